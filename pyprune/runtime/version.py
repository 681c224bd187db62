"""The version of this package, in a module that imports nothing: records, profiles and files name it."""

VERSION = "0.1.0"
