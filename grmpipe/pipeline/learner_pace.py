"""Speed of a learner in a step: tokens per second, and model FLOPs utilization (MFU). Pure."""

from grmpipe.types import Metrics


def with_pace(learnt: Metrics, seconds: float) -> Metrics:
    """The metrics of a learner's step, with its speed in the `seconds` in which it worked.

    MFU is that of PaLM (arXiv 2204.02311, appendix B): operations that the model needs over the peak of all ranks. What
    activation checkpointing computes again doesn't count; that would be hardware FLOPs utilization (HFU). Devices whose
    peak is unknown, such as cores, have none.
    """
    metrics, flops, peak = dict(learnt), learnt.get("perf/model_flops"), learnt.get("perf/peak_flops_per_s")
    if not seconds > 0:
        return metrics
    for name, tokens in (("tokens_per_s", "train/packed_tokens"), ("trained_tokens_per_s", "train/loss_tokens")):
        if tokens in learnt:
            metrics[f"learner/{name}"] = learnt[tokens] / seconds
    if flops is not None:
        metrics["perf/model_flops_per_s"] = flops / seconds
        if peak is not None:
            metrics["perf/mfu"] = flops / (peak * seconds)
    return metrics
