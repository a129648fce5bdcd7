"""llama-lease: a fair lease on one GPU in front of model servers.

Reading order, which is the order of a request: app, handler, auth, body, classify, lease (its rules: line,
residency), then forward with relay, or speech; metrics and status only watch.
"""

__version__ = "0.1.0"
