"""The error of a step whose gradients are inf or nan, known in every process. Needs no torch."""


class NonFiniteGradients(ArithmeticError):
    """The gradient norm is inf or nan. The batch was discarded; the weights are unchanged."""

    def __init__(self, norm: float, lr_key: str = "train.lr", group_ids: tuple[str, ...] = ()) -> None:
        """`group_ids`: groups whose advantages aren't finite, if that is the cause."""
        super().__init__(norm, lr_key, group_ids)
        self.norm = norm
        self.lr_key = lr_key
        self.group_ids = group_ids

    def __str__(self) -> str:
        problem = f"the gradient norm is {self.norm}"
        if self.group_ids:
            few = ", ".join(self.group_ids[:8]) + (", ..." if len(self.group_ids) > 8 else "")
            return (
                f"{problem}, since the advantages of {len(self.group_ids)} groups are not finite ({few}): no step was "
                "made; check their rewards in judgements.jsonl, and the KL or values subtracted from them"
            )
        return f"{problem}: training diverged, no step was made; try a lower {self.lr_key}"
