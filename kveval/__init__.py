"""kveval: may this model be served with this KV cache format at this context length?"""

__version__ = "0.1.0"
