"""What all sessions of a generative judge share: its template, its client, how votes become verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.judge.grm import GrmPrompt
from grmpipe.judge.grm_client import GrmClient
from grmpipe.judge.prompt import JudgePrompt, PrinciplesPrompt, with_texts
from grmpipe.judge.protocols.early_stop import Noise
from grmpipe.judge.protocols.prompt_truncation import truncate_to_fit
from grmpipe.judge.protocols.split_steps import Decode
from grmpipe.judge.trajectory import Trajectory, make_trajectory, note_truncation
from grmpipe.judge.verdict import make_failure
from grmpipe.judge.votes import JudgeVote
from grmpipe.models.chat.long_texts import off_loop_if_long
from grmpipe.types import Failed, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """Shared parts of one judge. `decode`: of the policy's tokens, for steps."""

    client: GrmClient
    config: JudgeConfig
    template: JudgePrompt
    principles_template: PrinciplesPrompt | None  # None: principles are part of each judgement
    vote: JudgeVote
    decode: Decode | None
    seed: int
    noise: Noise = field(default_factory=Noise)

    @property
    def scale(self) -> Scale:
        return self.config.scale

    def show_rollout(self, prompt: Prompt, rollout: Rollout) -> Trajectory:
        """What the judge sees of a rollout: `judge.format.show_thoughts`, `judge.format.show_truncation`."""
        shown = make_trajectory(prompt, rollout, thoughts=self.config.format.show_thoughts)
        return note_truncation(shown, rollout) if self.config.format.show_truncation else shown

    async def prompt(
        self, prompt: Prompt, responses: Sequence[Trajectory], principles: str | None
    ) -> GrmPrompt | Failed:
        """The GRM's prompt for some responses, or a failure: refused or too_long."""

        asked = with_texts(prompt, self.client.grm.escape_text)

        def render(shown: Sequence[Trajectory]) -> GrmPrompt:
            spelt = [trajectory.change_texts(self.client.grm.escape_text) for trajectory in shown]
            return self.client.grm.prompt(self.template.render(asked, *spelt, principles=principles))

        try:
            made = await off_loop_if_long(
                sum(len(passage.text) for response in responses for passage in response.passages),
                partial(truncate_to_fit, render, responses, self.client.room, self.config.format.truncation),
            )
        except ValueError as error:
            return make_failure("refused", str(error))
        if isinstance(made, str):
            return make_failure("too_long", f"{self.client.grm.name}: {made}")
        return made
