"""The formats that keys and values are stored in with one byte per number. Host only."""

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""By dtype, the number that a row's largest component is stored as."""
