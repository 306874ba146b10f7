#include "requests.h"

#include <algorithm>
#include <cstdio>

#include "driver.h"
#include "obstacles.h"

namespace flowgpu::service {

void fail(flowgpu_reply& reply, flowgpu_status status, const char* detail, CUresult result) {
    reply.status = status;
    reply.driver_result = result;
    snprintf(reply.detail, sizeof reply.detail, "%s", detail);
}

void fail_driver(flowgpu_reply& reply, const char* what, CUresult result) {
    const char* name = nullptr;
    FG_REAL(cuGetErrorName)(result, &name);
    char detail[FLOWGPU_DETAIL_BYTES];
    snprintf(detail, sizeof detail, "%s: %s", what, name ? name : "unknown error");
    fail(reply, FLOWGPU_DRIVER, detail, result);
}

bool refused(flowgpu_reply& reply, uint32_t engine, bool still) {
    const std::string names = obstacles(engine, still);
    if (!names.empty())
        fail(reply, FLOWGPU_REFUSED, names.c_str());
    return !names.empty();
}

namespace {

constexpr rlim_t kManyFiles = 1 << 16;

} // namespace

ManyDescriptors::ManyDescriptors() {
    getrlimit(RLIMIT_NOFILE, &programs_);
    lifted_.rlim_cur = lifted_.rlim_max = std::max<rlim_t>(programs_.rlim_max, kManyFiles);
    if (setrlimit(RLIMIT_NOFILE, &lifted_) == 0)
        return;
    lifted_.rlim_cur = lifted_.rlim_max = programs_.rlim_max;
    setrlimit(RLIMIT_NOFILE, &lifted_);
}

ManyDescriptors::~ManyDescriptors() {
    rlimit now;
    if (getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == lifted_.rlim_cur &&
        now.rlim_max == lifted_.rlim_max)
        setrlimit(RLIMIT_NOFILE, &programs_);
}

} // namespace flowgpu::service
