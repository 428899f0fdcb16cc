"""What may run the rewritten graphs."""

from __future__ import annotations

EAGER, INDUCTOR = "eager", "inductor"
BACKENDS = (EAGER, INDUCTOR)
