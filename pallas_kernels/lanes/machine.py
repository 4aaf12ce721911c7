"""What both machines share."""

LANES = 128
HALF_LIMIT = 65504.0  # the largest float16
