"""What the tests of several rooms share; worker processes import its classes from here.

models        modules in float64 and their data; streams and huggingface_streams are data without addresses
training      runs on a grid, the plain loop that they must equal, and views of what a run left behind
growth        runs in which replacements come: what waits for them, and views of the history
fake_nccl     NCCL and a device, imitated; nccl_models is a model whose workers use it
stages        steps by hand over the stages of a model, in one process
process_tree  other processes, as tests look at them; scripts starts one as a user does
sampling      matrices of which the suite runs a part
waiting       waits with a bound; thread_client is a worker's connection whose end is not that of the process
"""

import os

if "SIMULATED_DEVICES_IN_TESTS" in os.environ:  # make test-device
    from simulated_device.accelerator import in_place_of_the_cpu

    in_place_of_the_cpu()
