"""How many tokens go through the model at once, by how fast it took the last ones. Pure: it reads no clock."""

PIECE_S = 2.0  # of a forward pass; what waits for its end, such as an abort or a pause, waits about as long
FIRST_TOKENS = 64  # before any speed is known
LEAST_TOKENS = 32  # of a piece: fewer would be little faster, since each pass reads all weights; of a measurement, too


class PrefillPace:
    """The size of the next piece.

    tokens: of the next pass, at most `most_tokens`. is_fixed: always that many, however long they take.
    """

    def __init__(self, most_tokens: int, *, is_fixed: bool = False) -> None:
        self._most_tokens, self._is_fixed = most_tokens, is_fixed
        self.tokens = most_tokens if is_fixed else min(FIRST_TOKENS, most_tokens)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take the duration of a pass. Only the last one counts: load comes and goes faster than an average does."""
        if self._is_fixed or num_tokens < min(LEAST_TOKENS, self._most_tokens):
            return
        in_time = self._most_tokens if seconds <= 0 else int(num_tokens * PIECE_S / seconds)
        self.tokens = min(max(in_time, LEAST_TOKENS), self._most_tokens)
