"""The names of tests.support.ranks that tests import from here."""

from ..support.ranks import Results as Results
from ..support.ranks import agreed as agreed
from ..support.ranks import assert_passed as assert_passed
from ..support.ranks import case as case
