"""Both implementations of an update, for tests of what holds for either."""

import pytest
import torch

from roundpipe.optim.build import kernel
from roundpipe.optim.compiled import Kernel


@pytest.fixture(params=["compiled", "chunks"], scope="session")
def implementation(request):
    if request.param == "compiled" and not isinstance(kernel(), Kernel):
        pytest.skip(f"no compiled update on this machine: {kernel()}")
    return request.param


@pytest.fixture
def threads():
    """Sets the number of intra-op threads of this thread; puts it back at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
