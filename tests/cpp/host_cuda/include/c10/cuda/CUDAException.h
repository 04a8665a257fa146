// Stands in for torch's header where the host is the device: nothing fails.
#pragma once

#define C10_CUDA_CHECK(call) (call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)
