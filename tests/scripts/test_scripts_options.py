from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from lib.check import RULES, Machine, problems, resolve, validated
from lib.model import ddp_config
from lib.options import Options, parse

from tests.lib.scripts.script_runs import ROOT, run_script

CHECKS = ()  # of the scripts' options

CPU = Machine(world_size=2, cuda=False, transformer_engine=False)
GPU = Machine(world_size=2, cuda=True, transformer_engine=True)

GOOD = (
    "--num-layers=2",
    "--hidden-size=64",
    "--num-attention-heads=4",
    "--seq-length=32",
    "--micro-batch-size=2",
    "--global-batch-size=8",
    "--train-iters=10",
    "--lr=1e-3",
    "--mock-data",
)


def _resolved(*flags: str, machine: Machine = CPU) -> tuple[Options, list[str]]:
    return resolve(parse([*GOOD, *flags]), machine)


def test_good_options_pass() -> None:
    options, lines = validated(parse(GOOD), CPU)
    assert options.ffn_hidden_size == 256
    assert options.kv_channels == 16
    assert options.lr_decay_iters == 10
    assert options.distributed_backend == "gloo"
    assert options.ckpt_format == "fsdp_dtensor"
    assert options.transformer_impl == "local"
    assert any("--bias-gelu-fusion is off" in line for line in lines)
    fsdp, _ = _resolved("--use-megatron-fsdp", machine=GPU)
    assert fsdp.distributed_backend == "nccl"
    assert fsdp.ckpt_format == "fsdp_dtensor"
    assert fsdp.use_distributed_optimizer
    assert fsdp.transformer_impl == "transformer_engine"
    assert problems(fsdp, GPU) == []


# flags, what the one error must say: option and value, and a part of the remedy
BAD = (
    (["--global-batch-size=6"], "6 is not a multiple of --micro-batch-size 2 x 2", "multiple of 4"),
    (["--save=x"], "--save or --load without --use-megatron-fsdp", "Megatron-LM's script"),
    (["--hidden-size=66"], "66 is not a multiple of --num-attention-heads 4"),
    (["--group-query-attention", "--num-query-groups=3"], "--num-query-groups 3 does not divide"),
    (["--max-position-embeddings=16"], "--max-position-embeddings 16 is less than --seq-length 32"),
    (["--hidden-dropout=1"], "--hidden-dropout 1.0", "below 1"),
    (["--transformer-impl=transformer_engine"], "needs a GPU", "use --transformer-impl local"),
    (["--cross-entropy-loss-fusion"], "--cross-entropy-loss-fusion is compiled for the GPU"),
    (["--gradient-accumulation-fusion"], "--gradient-accumulation-fusion needs CUDA"),
    (["--tensor-model-parallel-size=3"], "3 does not divide the number of processes 2"),
    (["--min-lr=1"], "--min-lr 1.0 is more than --lr 0.001"),
    (["--lr-warmup-iters=10"], "--lr-warmup-iters 10 is not less than --lr-decay-iters 10"),
    (["--grad-reduce-in-bf16"], "--grad-reduce-in-bf16 without --bf16"),
    (["--use-megatron-fsdp", "--ddp-bucket-size=9"], "--ddp-bucket-size with --use-megatron-fsdp"),
    (["--recompute-granularity=full"], "needs --recompute-method"),
    (["--recompute-method=block"], "only go with --recompute-granularity full"),
    (["--distributed-backend=nccl"], "--distributed-backend nccl", "Use gloo"),
    (["--bf16", "--fp8-format=hybrid"], "hybrid with --transformer-impl local", "on a GPU"),
    (["--fp8-format=hybrid"], "--fp8-format hybrid without --bf16", "Give --bf16"),
    (["--fp8-param-gather"], "--fp8-param-gather without --fp8-format", "or leave it out"),
    (["--sequence-parallel"], "--sequence-parallel with --tensor-model-parallel-size 1"),
    (["--expert-model-parallel-size=2"], "size 2 without --num-experts", "leave it out"),
    (["--num-experts=3", "--expert-model-parallel-size=2"], "2 does not divide --num-experts 3"),
    (["--num-experts=4", "--expert-model-parallel-size=4"], "4 x --expert-tensor-parallel-size 1"),
    (["--num-experts=4", "--moe-router-topk=5"], "topk 5 is more than --num-experts 4"),
    (["--num-experts=4", "--tensor-model-parallel-size=2"], "2 needs --sequence-parallel"),
    (["--num-experts=4", "--moe-grouped-gemm"], "--moe-grouped-gemm needs --transformer-impl"),
    (["--num-experts=4", "--moe-permute-fusion"], "--moe-permute-fusion needs a GPU"),
    (["--num-experts=0"], "--num-experts 0 must be at least 1"),
    (
        ["--num-experts=4", "--overlap-moe-expert-parallel-comm"],
        "needs --expert-model-parallel-size above 1",
        "needs --bf16",
    ),
    (["--num-experts=4", "--delay-wgrad-compute"], "needs --overlap-moe-expert-parallel-comm"),
    (["--separate-all-gather-groups"], "groups without --use-megatron-fsdp"),
    (["--init-model-with-meta-device"], "device without --use-megatron-fsdp"),
    (["--overlap-param-gather"], "needs --use-distributed-optimizer and --overlap-grad-reduce"),
    (["--num-distributed-optimizer-instances=2"], "instances 2 needs --use-distributed-optimizer"),
    (["--save-interval=5"], "--save-interval 5 without --save"),
    (
        ["--override-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"],
        "--override-opt-param-scheduler takes this run's schedule",
        "Give one of them",
    ),
    (["--no-mock-data"], "give --train-data-path", "or --mock-data, one of them"),
    (["--train-data-path=x"], "or --mock-data, one of them"),
    (["--no-mock-data", "--train-data-path=x"], "--eval-iters 100, but there is no validation"),
    (["--tokenizer-type=NullTokenizer"], "NullTokenizer needs --vocab-size"),
    (["--vocab-size=9"], "--vocab-size 9 with --tokenizer-type ByteLevelTokenizer"),
    (["--padded-vocab-size=256"], "--padded-vocab-size 256 has no row for the end of a document"),
    (["--num-layers=0"], "--num-layers 0 must be at least 1"),
    (["--eval-iters=-1"], "--eval-iters -1 must be at least 0"),
)


ONE_QUEUE = dataclasses.replace(GPU, max_connections="1")
ON_GPUS = (
    (ONE_QUEUE, ["--use-megatron-fsdp"], "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    (GPU, ["--distributed-backend=gloo"], "Use nccl, or hide the GPUs"),
)
CASES = [(CPU, *case) for case in BAD]
CASES.extend(ON_GPUS)


def _name_of(case: tuple) -> str:
    _, flags, *_ = case
    return " ".join(flags)


@pytest.mark.parametrize("case", CASES, ids=_name_of)
def test_bad_input_is_one_error_with_option_value_and_remedy(case: tuple) -> None:
    machine, flags, *texts = case
    options = parse([*GOOD, *flags])
    with pytest.raises(ValueError) as error:
        validated(options, machine)
    message = str(error.value)
    for text in texts:
        assert text in message, message


def test_every_rule_has_a_bad_input() -> None:
    """Each text that a rule can give is given by a case above."""
    given: set[str] = set()
    tried = [case[1] for case in CASES]
    tried.append(["--tensor-model-parallel-size=2", "--padded-vocab-size=301"])
    tried.append(["--tensor-model-parallel-size=8"])
    for flags in tried:
        for machine in (CPU, GPU, ONE_QUEUE):
            options, _ = _resolved(*flags, machine=machine)
            if options.num_layers > 0:
                given |= {text for broken, text in RULES if broken(options, machine)}
    for _, text in RULES:
        assert text in given


NO_DATA = ("--no-mock-data", "--eval-iters=0")
MISTAKES = {
    FileNotFoundError: [
        ([*NO_DATA, "--train-data-path=/no/x"], r"--train-data-path /no/x: no file /no/x"),
        (
            [*NO_DATA, "--train-data-path", "1", "/no/a", "2", "/no/b"],
            r"/no/b\.bin and /no/b\.idx.*prepare_data",
        ),
        ([*NO_DATA, "--train-data-path={tmp}/d"], r"no file (?!.*d\.bin).*d\.idx"),
        (
            ["--use-megatron-fsdp", "--load=/no/where"],
            r"--load /no/where: no such folder.*leave --load",
        ),
        (["--config=nowhere.yaml"], r"--config nowhere\.yaml"),
    ],
    ValueError: [
        # Everything at once.
        (
            ["--min-lr=1", "--grad-reduce-in-bf16", "--load={tmp}/none"],
            "(?s)(?=.*--min-lr)(?=.*--grad-reduce-in-bf16 without).*none: no such folder",
        ),
        # Words that no flag takes.
        (["--no-such-flag"], "no-such-flag"),
        (["--num-layers=two"], "num-layers.*two"),
        (["--num-lay=2"], "num-lay"),
        (["--data-parallel-sharding-strategy=zero9"], "zero9.*no_shard.*optim_grads_params"),
        (["--ckpt-format=torch_dist"], "torch_dist.*fsdp_dtensor"),
        (["--fp8-recipe=fast"], "fast.*delayed"),
        (["--normalization=BatchNorm"], "BatchNorm.*RMSNorm"),
        # Presets.
        (["num-layer: 2\n"], "unknown key 'num-layer', did you mean 'num-layers'"),
        (["bf16: 1\n"], "bf16 is 1, must be true or false"),
        (["num-layers: [1, 2]\n"], r"num-layers is \[1, 2\], must be one int"),
        (["num-layers: true\n"], "num-layers is True, must be one int"),
        (["- 1\n"], "must hold 'flag: value' lines"),
        (["a: [\n"], "not valid YAML"),
    ],
}
"""Flags, or the text of a preset, and what the error says."""


def _preset(tmp_path: Path, text: str) -> str:
    path = tmp_path / "preset.yaml"
    path.write_text(text)
    return f"--config={path}"


ROWS = []
for error, rows in MISTAKES.items():
    for row in rows:
        ROWS.append((error, *row))


@pytest.mark.parametrize(("error", "flags", "text"), ROWS)
def test_a_mistake_is_one_error(
    tmp_path: Path, error: type[Exception], flags: list[str], text: str
) -> None:
    (tmp_path / "d.bin").touch()
    given = []
    for flag in flags:
        if "\n" in flag:
            given.append(_preset(tmp_path, flag))
        else:
            given.append(flag.format(tmp=tmp_path))
    with pytest.raises(error, match=text):
        validated(parse([*GOOD, *given]), CPU)


def test_required_flags_are_all_named() -> None:
    with pytest.raises(ValueError, match="--hidden-size, --num-attention-heads"):
        parse(["--num-layers=2"])


def test_options_of_the_wrappers_table_are_flags_that_reach_its_config() -> None:
    flags = ["--use-megatron-fsdp", "--fsdp-copy-engine-all-gather"]
    config = ddp_config(_resolved(*flags, "--expert-outer-dp-sharding-strategy=optim")[0])
    assert config.fsdp_copy_engine_all_gather
    assert config.expert_outer_dp_sharding_strategy == "optim"
    with pytest.raises(ValueError, match="--fsdp-elastic"):
        parse([*GOOD, "--fsdp-elastic=host:1"])


def test_command_line_overrides_preset(tmp_path: Path) -> None:
    text = "num-layers: 7\nbf16: true\nlr: 0.5\nseed: 3\ntrain-data-path: [a, b]\n"
    preset = _preset(tmp_path, text)
    options = parse([*GOOD, preset, "--no-bf16"])
    assert options.num_layers == 2
    assert options.bf16 is False
    assert options.lr == 1e-3
    assert options.seed == 3
    assert options.train_data_path == ("a", "b")
    without_layers = parse([preset, *GOOD[1:]])
    assert without_layers.num_layers == 7


PRESETS = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if "bridge" not in p.name]


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.name)
def test_presets_parse_and_break_no_rule(path: Path) -> None:
    if path.name.startswith("cpu"):
        machine = CPU
    else:
        machine = dataclasses.replace(GPU, world_size=8)
    for more in ([], ["--use-megatron-fsdp"]):
        given = parse([f"--config={path}", "--mock-data", *more])
        options, _ = validated(given, machine)
        assert options.use_megatron_fsdp is bool(more)


def test_script_ends_with_one_message_before_any_process_group() -> None:
    done = run_script("pretrain_gpt.py", *GOOD, "--data-parallel-sharding-strategy=zero9")
    assert done.returncode == 2
    assert "zero9" in done.stderr
    assert "Traceback" not in done.stderr
