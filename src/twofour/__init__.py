"""Make a neural network 2:4 sparse, prove that it is as accurate, and run it faster on the machine you have."""
