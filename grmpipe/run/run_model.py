"""One model of a run, whatever it does in it: what was found for it, and what runs for it."""

from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.config.grm import ModelEntry
from grmpipe.judge.grm import Grm
from grmpipe.judge.tool_grm import JudgeTools
from grmpipe.models.types import ChatEngine, Generates, RemoteScorer, RemoteTeacher, Scorer
from grmpipe.roles.roles import Model
from grmpipe.run.export import export
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.routing.scorers import ScorerPool
from grmpipe.scheduler.slots.engine_replacement import push_to_living
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.learner_ranks import LearnerRanks


@dataclass(slots=True, kw_only=True)
class RunModel:
    """A model has some of these, by what it does: it is never asked for its name.

    entry:        its section of the configuration. Models without one have the policy's: a critic is exported under the
                  policy's chat template.
    found:        its files, tokenizer and window; None: only its endpoint has them.
    engines:      generate its tokens, and score them, here.
    scorer:       gives one number for a text, here or behind an endpoint; `scorer_pool`: its processes here.
    scorer_clock: times the answers of a scorer behind an endpoint.
    clients:      the connections to its endpoint.
    learner_role: the role of its ranks, and their folder in a checkpoint.
    ranks:        all ranks of its learner.
    sync:         brings other weights to its engines than those they started with: its learner's, or the policy's.
    grm:          the model as generative judges ask it.
    tools:        those of judges that ask it, by judge.
    teacher:      the model as it scores the policy's tokens.
    """

    name: str
    entry: ModelEntry
    found: Model | None = None
    engines: Router | None = None
    scorer: Scorer | None = None
    scorer_pool: ScorerPool | None = None
    scorer_clock: ActiveClock | None = None
    clients: tuple[ChatEngine | RemoteTeacher | RemoteScorer, ...] = ()
    learner_role: str = ""
    ranks: LearnerRanks | CriticLearnerRanks | None = None
    sync: WeightSync | None = None
    grm: Grm | None = None
    tools: dict[str, JudgeTools] = field(default_factory=dict)
    teacher: Generates | None = None

    @property
    def files(self) -> Model:
        assert self.found is not None, f"only an endpoint has the files of {self.name}"
        return self.found

    @property
    def router(self) -> Router:
        assert self.engines is not None, f"{self.name} has no engines here"
        return self.engines

    @property
    def learner(self) -> LearnerRanks:
        """Its ranks, whose weights engines get."""
        assert isinstance(self.ranks, LearnerRanks), f"{self.name} has no learner that serves engines"
        return self.ranks

    async def push(self, version: int) -> SyncReport:
        """Bring its weights to all its living engines, with confirmation."""
        assert self.sync is not None, f"the weights of {self.name} never change"
        return await push_to_living(self.sync, self.router, version)

    @property
    def trained_ranks(self) -> LearnerRanks | CriticLearnerRanks:
        assert self.ranks is not None, f"{self.name} doesn't learn"
        return self.ranks

    async def load(self, checkpoint: Path) -> None:
        """Load its learner's state."""
        await self.trained_ranks.load(str(checkpoint / self.learner_role))

    async def begin_save(self, checkpoint: Path, *, in_background: bool) -> None:
        """Begin to save its learner's state, see Ranks.begin_save."""
        await self.trained_ranks.begin_save(str(checkpoint / self.learner_role), in_background=in_background)

    async def export(self, run_dir: Path) -> None:
        """Write what it learned to the run's directory, as a Hugging Face directory."""
        await export(self.trained_ranks, run_dir / self.name, self.entry)

    async def close(self) -> None:
        """End its clients; its processes end with the cluster."""
        for client in self.clients:
            await client.close()
