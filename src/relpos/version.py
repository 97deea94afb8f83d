"""The version, apart from the package that exports it, so that parts of it may know it."""

__version__ = "0.1.0"
