"""Checks that a model sees each packed sample alone: refused by its outline, probed with its weights.

Packed attention separates samples only in attention. A recurrent or convolutional layer runs across their borders, and
a window or a choice of keys that exists only in a mask is lost: log-probs are then wrong without any error.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grmpipe.models.lm.causal_lm import compute_packed_logprobs, outline_causal_lm
from grmpipe.models.lm.packable_configs import unpackable_config
from grmpipe.models.lm.packing import Prefixes
from grmpipe.models.lm.parallel.context_parallel import ContextRanks
from grmpipe.models.lm.scalar_head import HEAD, compute_packed_scores

WORKS = "models of full and sliding attention can be trained: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, ..."

PREFIX, FIRST, SECOND = (5, 3, 8, 2, 9), (4, 6, 3, 7, 5, 8), (7, 1, 3, 6, 2, 9, 4)
PROBE_TOLERANCE, PROBE_TOLERANCE_16BIT = 1e-3, 0.1  # mean nats, or share of a hidden state's norm


def check_trainable(path: str) -> None:
    """Raises ValueError (`path: ...`) if the model there can't be trained on packed samples. Reads no weights."""
    try:
        outline = outline_causal_lm(path)
    except ValueError as error:
        raise error if str(error).startswith("path: ") else _refused(path, str(error)) from error
    except (AttributeError, ImportError, KeyError, TypeError) as error:  # a class without such attention
        raise _refused(path, f"transformers can't build it with packed attention ({error!r})") from error
    check_packable(outline, path)


def check_packable(model: PreTrainedModel, path: str) -> None:
    """The same check for an outline with any head."""
    if (why := unpackable(model)) is not None:
        raise _refused(path, why)


def _refused(path: str, why: str) -> ValueError:
    return ValueError(f"path: {path!r} can't be trained: {why}; {WORKS}")


def unpackable(model: PreTrainedModel) -> str | None:
    """Why its samples can't be packed. None if no reason is known."""
    config = model.config.get_text_config()
    if (why := unpackable_config(config)) is not None:
        return why
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"{name} ({type(module).__name__}) crosses the borders of packed samples"
        if getattr(module, "is_causal", True) is False:
            return f"{name} ({type(module).__name__}) isn't causal"
    return None


# -- with its weights ------------------------------------------------------------------------------------------------


def probe_logprobs(
    model: PreTrainedModel, device: torch.device, dtype: str, context: ContextRanks | None = None
) -> None:
    """Compare a short sample packed after another one, and with a shared prefix, with the sample alone, as transformers
    calls the model. Three passes, a collective; the caller disables gradients. context: ranks that share samples.

    Raises ValueError (`path: ...`) if mean log-probs differ by more than rounding.
    """
    sample_T = torch.tensor(PREFIX + SECOND, device=device)
    logits_TV = model(input_ids=sample_T[None], use_cache=False).logits[0, :-1]
    alone_T = logits_TV.float().log_softmax(-1).gather(-1, sample_T[1:, None]).squeeze(-1)
    for num_shared in (0, len(PREFIX)):
        packed_T = compute_packed_logprobs(model, *_behind_another(num_shared, device), context=context).logprobs_T
        packed = packed_T[-len(SECOND) :]
        off = float((packed - alone_T[-len(SECOND) :]).abs().mean())
        _refuse_above(choose_tolerance(dtype), off, "nats", num_shared, model)


def probe_scores(model: PreTrainedModel, device: torch.device, dtype: str) -> None:
    """The same check on the inputs of a scalar head, because a new head always gives 0; the difference is relative to
    their norm.
    """
    read: list[Tensor] = []
    hook = model.get_submodule(HEAD).register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0].detach()))
    try:
        model(input_ids=torch.tensor([PREFIX + SECOND], device=device), use_cache=False)
        compute_packed_scores(model, *_behind_another(0, device)[:3])
    finally:
        hook.remove()
    alone_TD, packed_TD = (hidden_TD[-len(SECOND) :].float() for hidden_TD in read)
    off = float((packed_TD - alone_TD).norm() / alone_TD.norm())
    _refuse_above(choose_tolerance(dtype), off, "of a hidden state", 0, model)


def choose_tolerance(dtype: str) -> float:
    return PROBE_TOLERANCE_16BIT if dtype in ("bfloat16", "float16") else PROBE_TOLERANCE


def _behind_another(num_shared: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Prefixes]:
    """Token ids, positions, lengths and prefixes of PREFIX + FIRST, then PREFIX + SECOND without the shared tokens."""
    first, own = PREFIX + FIRST, (PREFIX + SECOND)[num_shared:]
    positions = (*range(len(first)), *range(num_shared, num_shared + len(own)))
    prefixes = Prefixes(parents_S=torch.tensor([0, 0 if num_shared else 1]), lengths_S=torch.tensor([0, num_shared]))
    ids_T, positions_T = torch.tensor(first + own, device=device), torch.tensor(positions, device=device)
    return ids_T, positions_T, torch.tensor([len(first), len(own)]), prefixes


def _refuse_above(tolerance: float, off: float, unit: str, num_shared: int, model: PreTrainedModel) -> None:
    if off <= tolerance:
        return
    how = "with a shared prompt" if num_shared else "packed behind another"
    raise ValueError(
        f"path: {type(model).__name__} computes a sample {how} differently than alone: off by {off:.2g} {unit}, "
        f"but rounding explains only {tolerance}; training would learn from wrong log-probs; {WORKS}"
    )
