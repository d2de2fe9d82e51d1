"""The learner on one rank: gradients of micro-batches, optimizer steps, weights out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grmpipe.algorithm.corrections import TokenLogprobs
from grmpipe.algorithm.objective import Objective
from grmpipe.config.train import LAYERS
from grmpipe.models.hub import find_files
from grmpipe.models.lm.causal_lm import PackedLogprobs, compute_packed_logprobs
from grmpipe.models.lm.checkpoint import average_files, export_hf
from grmpipe.models.lm.footprint import read_footprint
from grmpipe.models.lm.lora import with_adapters, without_adapters
from grmpipe.models.lm.packed_check import probe_logprobs
from grmpipe.models.lm.parallel.context_parallel import ContextRanks
from grmpipe.models.lm.parallelize import CAUSAL_LM, Architecture, compile_layers, load_parallel, without_gradient
from grmpipe.models.settings import LM_HEAD, ROUTER
from grmpipe.train.learner.batch_metrics import BatchMetrics, DeviceUsage
from grmpipe.train.learner.device_batch import DeviceBatch
from grmpipe.train.learner.expert_replay import ExpertReplay
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.weight_sender import WeightSender
from grmpipe.train.training_rank import TrainingRank
from grmpipe.types import BatchTotals, Metrics, MicroBatch, OldPass


class Learner(TrainingRank):
    """One rank.

    accumulate() runs forward and backward on a micro-batch; step() ends their batch, discard() drops it. `sender` takes
    the weights to engines.
    """

    components: ClassVar = {"sender": WeightSender}

    def __init__(self, spec: LearnerSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        self._objective = Objective.of(spec.algorithm)  # before anything is loaded: it may be refused
        train, lora = spec.train, spec.lora
        updates = min(spec.algorithm.updates_per_batch, train.groups_per_batch)
        super().__init__(spec.device, rank, world_size, init_method, train, updates)
        self._context = ContextRanks.of(self._meshes.context)
        self._spec = spec
        self._files = find_files(spec.model_path, weights=rank == 0)  # on this machine
        model = load_parallel(
            self._files,
            self._meshes,
            self._device,
            spec.master_dtype,
            train.dtype,
            train.activations,
            self._architecture(with_adapters(lora, spec.frozen_dtype, spec.seed) if lora.learns else CAUSAL_LM),
        )
        with without_gradient(model):
            probe_logprobs(model, self._device, train.dtype, self._context)
        self._begin_training(model)
        # Without its adapters the model itself is the reference.
        needs_reference = spec.algorithm.kl_coefficient > 0 and not lora.learns
        self._reference = self._load_reference() if needs_reference else None
        self._experts = ExpertReplay(self._model, self._device, self._context, spec.algorithm.router_replay)
        self._sender = WeightSender(spec, self._model, self._device, rank)
        self._meter = BatchMetrics(self._device)
        self._usage = DeviceUsage(read_footprint(self._files).flops(lora), self._device, train.dtype, train.parallel.cp)

    @property
    def policy_version(self) -> int:
        """Completed batches: the version that engines see. Every batch has the same number of optimizer steps."""
        return self._spec.first_version + self._version // self._updates_per_batch

    def expect(self, num_steps: int) -> None:
        """Set the number of steps of the run if train.num_steps doesn't give it: the learning rate decays by it."""
        self._train = replace(self._train, num_steps=num_steps)

    def accumulate(self, micro_batch: MicroBatch, old: OldPass | None = None) -> Metrics:
        """Add the gradient of this micro-batch's summed loss; return its sums.

        pi_old is the detached log-prob of this pass, unless an earlier pass is given. That is right for one update per
        batch, because the weights are still those of pi_old.
        """
        algorithm = self._spec.algorithm
        batch = DeviceBatch.of(micro_batch, self._device, old)
        # First: if the reference is the model without its adapters, its pass must not come between two passes of the
        # policy.
        reference_T = self._reference_logprobs(batch) if algorithm.kl_in_reward is False else None
        with self._experts.replay_experts(batch.experts_TLK) as replay:
            with self._experts.count_load(idle=not micro_batch.loss_mask_E.any()):
                current = self._forward(self._model, batch, entropy=True)
            current_E = current.logprobs_T[batch.places_E]
            old_T = batch.old_logprobs_T
            ages_E = self.policy_version - batch.versions_E
            logprobs = TokenLogprobs(
                current_T=current_E,
                entropy_T=current.entropy_T[batch.places_E],
                old_T=current_E.detach() if old_T is None else old_T[batch.places_E],
                sampler_T=batch.sampler_logprobs_E,
                reference_T=None if reference_T is None else reference_T[batch.places_E],
                ages_T=ages_E,
                taught=None if batch.teacher is None else batch.teacher.beside(current, batch.places_E),
            )
            loss = self._objective.sum_loss(logprobs, batch.advantages_E, batch.loss_mask_E, batch.rollout_lengths_R)
            loss.total.backward()
        if self._experts.replays:
            share = self._experts.sum_rerouted(replay, batch.places_E, batch.loss_mask_E, len(batch.token_ids_T))
            loss = replace(loss, sums={**loss.sums, "rerouted_share": share})
        self._usage.add(micro_batch, gradients=True)
        if reference_T is not None:
            self._usage.add(micro_batch, gradients=False)
        return self._meter.add(loss, ages_E[batch.loss_mask_E > 0])

    def imitate(self, micro_batch: MicroBatch, totals: BatchTotals) -> None:
        """Add the gradient of algorithm.sft.coefficient times the negative log-likelihood of these demonstrations,
        weighted by their advantages. totals: those of the batch that the next step ends; their denominator divides it.
        """
        batch = DeviceBatch.of(micro_batch, self._device)
        with self._experts.count_load(idle=not micro_batch.loss_mask_E.any()):
            logprobs_T = self._forward(self._model, batch, temperature=1.0).logprobs_T
        nll = -(batch.advantages_E * batch.loss_mask_E * logprobs_T[batch.places_E]).sum()
        weighed = self._spec.algorithm.sft.coefficient * self._denominator(totals) * nll
        weighed.backward()
        self._usage.add(micro_batch, gradients=True)
        self._meter.add_imitated(weighed.detach(), nll.detach())

    def old_pass(self, micro_batch: MicroBatch) -> OldPass:
        """pi_old for batches with several updates, and the experts of the tokens if they are replayed."""
        self._usage.add(micro_batch, gradients=False)
        batch = DeviceBatch.of(micro_batch, self._device)
        with without_gradient(self._model), self._experts.replay_experts(batch.experts_TLK):
            return self._experts.record_old_pass(
                lambda: _to_host(self._forward(self._model, batch).logprobs_T), len(batch.token_ids_T)
            )

    def reference_logprobs(self, micro_batch: MicroBatch) -> np.ndarray:
        """log pi_ref for a KL that is subtracted from the rewards: [T] float32, 0 for untrained tokens."""
        reference_T = self._reference_logprobs(DeviceBatch.of(micro_batch, self._device))
        assert reference_T is not None, "kl_coefficient is above 0"
        self._usage.add(micro_batch, gradients=False)
        return _to_host(reference_T)

    def step(self, totals: BatchTotals) -> Metrics:
        """Divide the accumulated gradients by the size of the batch, clip, update. Returns means over all ranks'
        tokens, and what the batch took of this rank's device; nothing of an update without trained tokens, which is
        skipped: weights and moments stay, the version counts it.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        if totals.num_loss_tokens == 0:
            self.discard()
            self._version += 1
            return {}
        denominator = self._denominator(totals)
        if not denominator > 0:
            raise ValueError(f"algorithm.aggregation: the denominator must be above 0, got {denominator} for {totals}")
        metrics = {**self._meter.read(totals, denominator, self._meshes.data_group), **self._experts.balance()}
        try:
            update_metrics = self._step(denominator)
            usage = self._usage.read()
        finally:
            self.discard()
        return {**metrics, **update_metrics, **usage}

    def discard(self) -> None:
        """Drop the open batch."""
        self._optimizer.zero_grad()
        self._meter = BatchMetrics(self._device)
        self._experts.begin_batch()
        self._usage.reset()

    @property
    def sender(self) -> WeightSender:
        """The weights on their way to engines."""
        return self._sender

    def close(self) -> None:
        """Close the files and connections of the transport."""
        self._sender.close()

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (temperature 1) of all tokens except the first. An engine with these weights must give the same."""
        ids_T = torch.tensor(token_ids, device=self._device)
        lengths_S = torch.tensor([len(token_ids)])
        positions_T = torch.arange(len(token_ids), device=self._device)
        with without_gradient(self._model):
            scored = compute_packed_logprobs(
                self._model,
                ids_T,
                positions_T,
                lengths_S,
                fp32_logits=LM_HEAD in self._train.fp32_modules,
                context=self._context,
            )
            return tuple(scored.logprobs_T[1:].tolist())

    def export(self, directory: str) -> None:
        """Export a Hugging Face directory that any engine can serve, with the weights as the engines of the run had
        them; also the adapters separately, if they are trained.
        """
        spec = self._spec
        dtype = spec.train.export_dtype or spec.sync_dtype
        export_hf(directory, self._model, self._files, spec.lora, spec.adapter_dir, dtype=dtype)

    def average(self, directory: str, other: str, share: float) -> None:
        """Replace exported weights by `share` of theirs, and the rest of another model's."""
        average_files(directory, find_files(other, weights=True), share)

    def _denominator(self, totals: BatchTotals) -> float:
        return self._objective.aggregation.denominator(totals, self._spec.max_new_tokens)

    def _forward(
        self, model: PreTrainedModel, batch: DeviceBatch, entropy: bool = False, temperature: float | None = None
    ) -> PackedLogprobs:
        """temperature: None for that of the rollouts."""
        return compute_packed_logprobs(
            model,
            batch.token_ids_T,
            batch.position_ids_T,
            batch.sample_lengths_S,
            batch.prefixes,
            want_entropy=entropy,
            entropy_gradient=self._spec.algorithm.entropy_coefficient > 0,
            wanted_T=batch.wanted_T,
            also_TK=batch.teacher.likely_ids_TK if entropy and batch.teacher is not None else None,
            temperature=self._spec.temperature if temperature is None else temperature,
            fp32_logits=LM_HEAD in self._train.fp32_modules,
            context=self._context,
        )

    def _architecture(self, architecture: Architecture) -> Architecture:
        return replace(architecture, fp32_router=ROUTER in self._train.fp32_modules)

    def _load_reference(self) -> PreTrainedModel:
        """The model that training started from."""
        spec = self._spec
        reference = load_parallel(
            self._files,
            self._meshes,
            self._device,
            spec.frozen_dtype,
            spec.train.dtype,
            architecture=self._architecture(CAUSAL_LM),
        )
        if spec.train.compile == LAYERS:
            compile_layers(reference, self._device)
        return reference.requires_grad_(False)

    def _reference_logprobs(self, batch: DeviceBatch) -> Tensor | None:
        if self._spec.algorithm.kl_coefficient == 0:
            return None
        reference = self._reference if self._reference is not None else self._model
        with without_adapters(reference), without_gradient(reference):
            return self._forward(reference, batch).logprobs_T


def _to_host(logprobs_T: Tensor) -> np.ndarray:
    return logprobs_T.float().cpu().numpy()
