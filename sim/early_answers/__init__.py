"""Early answers under a virtual clock: the production estimator and published baselines on simulated arrivals.

`edgewater simulate early-answers` and `bench.early_answers` run studies (`study.run_study`). It imports the production
code of edge and center; nothing in it reads a clock.
"""
