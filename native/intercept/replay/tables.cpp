#include "arguments.h"
#include "bridge.h"

namespace flowgpu::replay::recorded {

CUresult cuGetExportTable(const void** table, const CUuuid* id) {
    return FG_DRIVER(cuGetExportTable)(table, id);
}

} // namespace flowgpu::replay::recorded
