// A client's arrays, and the texture and surface objects of a context, as bytes, for snapshot.cc.
#include "state.h"

namespace flowgpu::emu {

void save_arrays(const Client& client, Writer& w,
                 const std::function<uint32_t(const std::shared_ptr<Phys>&)>& index_of) {
    const auto arrays = client.every<Array>();
    w.put(static_cast<uint32_t>(arrays.size()));
    for (const auto& array : arrays) {
        w.put(array->handle);
        w.put(index_of(array->phys));
        w.put(array->offset);
        w.put(array->context);
        w.put(array->mipmap);
        w.put(array->about);
    }
    const auto mipmaps = client.every<Mipmap>();
    w.put(static_cast<uint32_t>(mipmaps.size()));
    for (const auto& mipmap : mipmaps) {
        w.put(mipmap->handle);
        w.put(index_of(mipmap->phys));
        w.put(mipmap->context);
        w.put(mipmap->number);
        w.put(mipmap->about);
        w.put(static_cast<uint32_t>(mipmap->levels.size()));
        w.put_bytes(mipmap->levels.data(), mipmap->levels.size() * sizeof(uint64_t));
    }
}

void load_arrays(Client& client, Reader& r,
                 const std::function<std::shared_ptr<Phys>()>& take_phys) {
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        auto array = client.make<Array>(r.take<uint64_t>());
        array->phys = take_phys();
        array->offset = r.take<uint64_t>();
        array->context = r.take<uint64_t>();
        array->mipmap = r.take<uint64_t>();
        array->about = r.take<CUDA_ARRAY3D_DESCRIPTOR>();
    }
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        auto mipmap = client.make<Mipmap>(r.take<uint64_t>());
        mipmap->phys = take_phys();
        mipmap->context = r.take<uint64_t>();
        mipmap->number = r.take<uint64_t>();
        mipmap->about = r.take<CUDA_ARRAY3D_DESCRIPTOR>();
        for (uint32_t level = r.take<uint32_t>(); level > 0 && r.good(); --level) {
            mipmap->levels.push_back(r.take<uint64_t>());
        }
    }
}

void save_bindings(const Context& context, Writer& w) {
    w.put(uint8_t{context.copied_arrays});
    w.put(static_cast<uint32_t>(context.bindings.size()));
    for (const auto& [number, binding] : context.bindings) {
        w.put(number);
        w.put(binding.kind);
        w.put(binding.resource);
        w.put(binding.texture);
        w.put(uint8_t{binding.viewed});
        w.put(binding.view);
    }
}

void load_bindings(Context& context, Reader& r) {
    context.copied_arrays = r.take<uint8_t>() != 0;
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        Binding& binding = context.bindings[r.take<uint64_t>()];
        binding.kind = r.take<Binding::Kind>();
        binding.resource = r.take<CUDA_RESOURCE_DESC>();
        binding.texture = r.take<CUDA_TEXTURE_DESC>();
        binding.viewed = r.take<uint8_t>() != 0;
        binding.view = r.take<CUDA_RESOURCE_VIEW_DESC>();
    }
}

} // namespace flowgpu::emu
