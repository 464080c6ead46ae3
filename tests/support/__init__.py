"""Helpers of the tests: no test module imports another."""
