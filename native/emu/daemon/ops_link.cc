// The linker: PTX in, a cubin of the emulated GPU's own form out. Its state is the client's.
#include "state.h"

namespace flowgpu::emu {

int32_t op_LinkCreate(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (s.context(&error) == nullptr) {
        return error;
    }
    s.out.put(s.client.new_handle());
    return CUDA_SUCCESS;
}

int32_t op_LinkPtx(Session& s) {
    CUresult error = CUDA_SUCCESS;
    std::string message;
    std::string_view text = s.in.take_blob();
    text = text.substr(0, text.find('\0'));
    const auto image = read_image(text, &error, &message);
    if (image == nullptr) {
        return refuse(s, error, message);
    }
    const std::string cubin = write_cubin(text, *image->code, s.machine().config().architecture);
    if (cubin.empty()) {
        return refuse(s, CUDA_ERROR_NOT_SUPPORTED, "more functions than a cubin has sections");
    }
    s.out.put_blob(cubin.data(), cubin.size());
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
