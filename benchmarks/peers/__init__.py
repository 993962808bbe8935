"""What a user of each peer would write: the tutorial's job through it, in the peer's own loop, and no Lockstep in it
but for the net, which is the same: the tutorial's with a clock in it (benchmarks/marked_net.py), or that of mnist.yaml.

`X.txt` pins the packages of a peer that this project does not use itself (benchmarks/environments.py installs them);
Accelerate, torchvision and torchrun are among its own (constraints.txt) and run in its own environment.
"""
