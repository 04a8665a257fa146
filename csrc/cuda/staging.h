// Streams that copy states between the host and a GPU (work/staging.h).
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "work/staging.h"

namespace torchopt_ext {

std::unique_ptr<StagingStreams> staging_streams(c10::Device device);

}  // namespace torchopt_ext
