"""Methods that choose hidden channels and train nothing towards the cut.

To add one, write a folder here whose name is the method's. It declares ``METHOD`` and imports no torch.
"""
