"""How far an evaluation of a policy is, and the line on it."""

from dataclasses import dataclass

from grmpipe.observe.progress import counts_text, join_shown, left_at_pace, left_text, speed_text


@dataclass(slots=True, kw_only=True)
class AnswerProgress:
    """Answers that were played and judged, of those that an evaluation asks for. One that can't be played, and so gets
    no verdict, is done too.
    """

    name: str = ""
    answers: int = 0
    to_judge: int = 0
    played: int = 0
    judged: int = 0
    tokens: int = 0  # sampled

    def describe(self, took_s: float) -> str:
        """The line after `took_s` seconds."""
        return join_shown(
            f"evaluation {self.name}",
            counts_text("answers", self.played, self.answers),
            counts_text("verdicts", self.judged, self.to_judge),
            speed_text("policy", self.tokens, took_s),
            left_text(left_at_pace(self.played + self.judged, self.answers + self.to_judge, took_s)),
        )
