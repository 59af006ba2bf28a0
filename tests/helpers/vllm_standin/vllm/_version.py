__version__ = version = "0.24.0"
