"""When a window is answered from a sample, without its stragglers, and what that answer may promise (Aion)."""
