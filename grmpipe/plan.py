"""What goes where, its memory, and the arithmetic of a batch: read off a configuration. Starts nothing."""

from __future__ import annotations

from grmpipe.assemble import Prepared
from models.footprint import Footprint, footprint_of
from scheduler.placement import describe


def plan(prepared: Prepared) -> str:
    """Three blocks of text: placement, memory, arithmetic."""
    return "\n\n".join([describe(prepared.placement), memory(prepared), arithmetic(prepared)])


def memory(prepared: Prepared) -> str:
    """Bytes per process of each role, by part."""
    config, lines = prepared.config, ["memory per process"]
    for model in [prepared.policy] + ([prepared.grm] if prepared.grm else []):
        options = config.policy if model.name == "policy" else config.grm
        footprint = footprint_of(model.path)
        rows = config.engine.embedded.max_batch_rows
        tokens = config.engine.embedded.max_context_tokens or model.renderer.context_tokens
        weights, cache = (
            footprint.weight_bytes(options.dtype),
            rows * tokens * footprint.kv_bytes_per_token(options.dtype),
        )
        lines.append(
            f"  {model.name:<8} weights {size(weights)}, KV at most {size(cache)} ({rows} rows x {tokens} tokens)"
        )
    lines.append(learner_line(prepared, footprint_of(prepared.policy.path)))
    return "\n".join(lines)


def learner_line(prepared: Prepared, footprint: Footprint) -> str:
    ranks = len(prepared.placement.seats["learner"])
    reference = prepared.config.algorithm.kl_coefficient > 0
    state = (
        footprint.num_parameters * 4 * (4 + reference)
    )  # fp32 weights, gradients, two moments; the reference's weights
    tokens = prepared.config.train.micro_batch_tokens
    activations = footprint.activation_bytes_per_token(prepared.config.train.dtype) * tokens
    return (
        f"  learner  weights, gradients and moments {size(state / ranks)} on each of {ranks} "
        f"rank{'s' * (ranks > 1)}, activations about {size(activations)} ({tokens} tokens)"
    )


def arithmetic(prepared: Prepared) -> str:
    config = prepared.config
    train, judge = config.train, config.judge
    rollouts = train.groups_per_batch * train.group_size
    in_flight = (train.max_staleness + 1) * train.groups_per_batch
    judgements = rollouts * judge.num_judgements if prepared.grm else 0
    lines = [
        "a step",
        f"  {train.groups_per_batch} groups x {train.group_size} siblings = {rollouts} rollouts, "
        f"at most {rollouts * config.rollout.max_new_tokens} tokens",
        f"  {rollouts} rollouts x {judge.num_judgements} judgements = {judgements} judgements, "
        f"at most {judgements * judge.max_new_tokens} tokens"
        if judgements
        else "  judged by a rule",
        f"  in flight: at most {in_flight} groups, {in_flight * train.group_size} rollouts "
        f"(max_staleness {train.max_staleness})",
        f"the run: {train.num_steps} steps, {train.num_steps * train.groups_per_batch} prompts "
        f"({train.num_steps * train.groups_per_batch / len(prepared.prompts):.2f} epochs of {len(prepared.prompts)}), "
        f"{len(prepared.held_out)} held out",
    ]
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
