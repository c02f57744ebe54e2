# shellcheck shell=bash
# ranks COMMAND...: one process a GPU. In place of torchrun, whose workers are in sessions of their
# own and outlive a killed launcher.
ranks() {
  local rank status=0 pids=()
  export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000)) WORLD_SIZE=$RANKS
  for ((rank = 0; rank < RANKS; rank++)); do
    RANK=$rank LOCAL_RANK=$rank "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}
export -f ranks
