"""First light: what one edge and one center do on this machine (`python -m bench.first_light`)."""
