"""Figures of this machine, each beside its floor, measured in the same run. They decide no test."""
