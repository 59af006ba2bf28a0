"""One module a command of `athanor`; each has one function from parsed arguments to an exit status."""
