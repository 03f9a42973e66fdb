"""Protocol by which the launchers of a gang agree when ranks may run: messages, proofs, two pure state machines.

Index 0's launcher runs a ``LeaderMachine`` and, as every launcher does, a ``FollowerMachine``; its own follower is a
peer like the others, only without a socket between them. The same machines run in real pods and in the simulator.
"""
