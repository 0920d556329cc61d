"""Tests of what is shown; `terminal` is a terminal to show it on."""
