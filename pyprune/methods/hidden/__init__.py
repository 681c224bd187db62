"""Methods that choose hidden channels and train nothing towards the cut.

To add one, write a folder here with the method's name. It declares ``METHOD`` and imports no torch.
"""
