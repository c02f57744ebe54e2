"""Token data: core's GPTDataset, and an order of samples that depends only on the sample count.

Sample k of a run is the same for any number of ranks, and after a resume. The number of samples
consumed so far determines the slice of the dataset that is a rank's next batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list

from lib.check import BYTE_VOCABULARY
from lib.distributed import Place
from lib.options import Options
from megatron_fsdp_adapter.tools.models.spec import padded_rows

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def vocabulary(options: Options) -> SimpleNamespace:
    """The tokenizer of GPTDataset: 256 bytes, or --vocab-size ids, and an end of document.

    It cannot read text: data is tokenized before training. `pad` is not an id of any text.
    """
    tokens = BYTE_VOCABULARY if options.vocab_size is None else options.vocab_size
    names = {"class": options.tokenizer_type, "tokens": tokens}
    return SimpleNamespace(
        name=options.tokenizer_type,
        vocab_size=tokens + 1,
        eod=tokens,
        pad=-1,
        unique_identifiers=names,
    )


def padded_vocab_size(options: Options) -> int:
    """Rows of the embedding: as given, or the vocabulary rounded up to a multiple on every rank."""
    if options.padded_vocab_size is not None:
        return options.padded_vocab_size
    multiple = options.make_vocab_size_divisible_by * options.tensor_model_parallel_size
    return padded_rows(vocabulary(options).vocab_size, multiple)


def build_datasets(options: Options) -> tuple[Any, Any]:
    """(training, validation) datasets; the second is None when the run does not evaluate.

    Collective: rank 0 builds the sample index first, the others read it.
    """
    batch = options.global_batch_size
    evaluations = 0  # the end of the run counts too
    if options.eval_interval is not None:
        evaluations = options.train_iters // options.eval_interval + 1
    valid = evaluations * options.eval_iters * batch
    sizes = [options.train_iters * batch, valid, 0]
    blend: dict[str, Any] = {}
    if options.train_data_path:
        valid_path = options.valid_data_path if valid else None
        paths = (options.train_data_path, valid_path, None)
        blend["blend_per_split"] = [get_blend_from_list(path and list(path)) for path in paths]
    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=options.seq_length,
        tokenizer=vocabulary(options),
        path_to_cache=options.data_cache_path,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # every attention here creates its mask
        **(blend or {"split": "1,1,0"}),
    )
    kind = MockGPTDataset if options.mock_data else GPTDataset
    train, validation, _ = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    return train, validation if valid else None


@dataclass(frozen=True)
class SampleOrder:
    """A batch sampler: indices of this rank's microbatches, from sample `consumed` on, without end.

    Global batch n of B samples is the samples n*B to n*B + B - 1. On d ranks, with microbatches of
    b samples, microbatch i of rank r begins at sample n*B + (i*d + r)*b. After its end the dataset
    is read from the beginning again.
    """

    length: int
    consumed: int
    micro_batch_size: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed
        while True:
            first = start + self.rank * self.micro_batch_size
            yield [k % self.length for k in range(first, first + self.micro_batch_size)]
            start += self.ranks * self.micro_batch_size


def batches(
    dataset: Any, consumed: int, options: Options, place: Place
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's microbatches on its device, from sample `consumed` of the run on.

    Each is {tokens, labels, position_ids: (micro batch, sequence) int64, loss_mask: float32}.
    """
    order = SampleOrder(
        len(dataset),
        consumed,
        options.micro_batch_size,
        place.data_parallel_rank,
        place.data_parallel_size,
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=order,  # type: ignore[arg-type]
        pin_memory=place.device.type == "cuda",
        # A separate generator: a loader would draw a seed from the default one, and change the
        # random numbers of a resumed run.
        generator=torch.Generator().manual_seed(options.seed),
    )
    for batch in loader:
        yield {key: batch[key].to(place.device, non_blocking=True) for key in BATCH_KEYS}
