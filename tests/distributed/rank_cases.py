"""The names of tests.support.ranks and compare that workers import from here."""

from tests.support.compare import difference as difference
from tests.support.ranks import counted_calls as counted_calls
from tests.support.ranks import digest as digest
from tests.support.ranks import full_tensor as full_tensor
from tests.support.ranks import gathered as gathered
from tests.support.ranks import run_cases as run_cases
