"""The size of a bucket of weights. Pure: plans ask for it too."""

BUCKETS_PER_PUSH = 16  # if the size of the bucket depends on the model's
SMALLEST_BUCKET_BYTES, LARGEST_BUCKET_BYTES = 64 << 20, 1 << 30


def choose_bucket_bytes(configured_bytes: int, num_bytes: float) -> int:
    """The configured size or, if it is 0, one for a model of so many bytes. Every bucket has a fixed cost, and a few of
    them take memory at both ends: few buckets for a large model, small ones for a small one.
    """
    by_model = max(SMALLEST_BUCKET_BYTES, min(LARGEST_BUCKET_BYTES, int(num_bytes) // BUCKETS_PER_PUSH))
    return configured_bytes or by_model
