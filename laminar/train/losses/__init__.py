"""One small file for each policy loss, all behind the signature in `loss.py`."""
