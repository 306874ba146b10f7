// Finds the variables of a cubin: ELF64 with NVIDIA's machine number. Sections and symbols as ptxas
// and NVRTC of CUDA 13 write them for sm_75 to sm_100, found with readelf.
#include "forms.h"

#include <algorithm>
#include <elf.h>

#include "fatbin.h"

namespace flowgpu {

namespace {

using fatbin::value_at;

constexpr uint16_t kCudaMachine = 190;
// Section types of relocatable cubins that, like SHT_NOBITS, have no bytes in the file.
constexpr uint32_t kGlobal = SHT_LOPROC + 0x7;
constexpr uint32_t kLocal = SHT_LOPROC + 0x9;
constexpr uint32_t kShared = SHT_LOPROC + 0xa;
constexpr uint32_t kReservedShared = SHT_LOPROC + 0x15;
// And what a variable is there, instead of STT_OBJECT.
constexpr unsigned kCudaObject = STT_LOPROC;

class Cubin {
  public:
    explicit Cubin(std::string_view bytes) : bytes_(bytes) {}

    bool run(size_t* size, Variables* variables, std::string* why) {
        const bool ok = read_tables() && read_names(variables);
        variables->by_address_alone &= ok && !has_code() && !has_addresses();
        *size = end_;
        *why = why_;
        return ok;
    }

  private:
    bool fail(const std::string& what) {
        why_ = "cubin: " + what;
        return false;
    }

    // True if `count` records lie within the bytes. Moves the end behind them.
    bool holds(uint64_t offset, uint64_t count, uint64_t record = 1) {
        if (offset > bytes_.size() || count > (bytes_.size() - offset) / record) {
            return fail("a table lies outside of it");
        }
        end_ = std::max<uint64_t>(end_, offset + count * record);
        return true;
    }

    Elf64_Shdr section(uint64_t index) const {
        return value_at<Elf64_Shdr>(bytes_, header_.e_shoff + index * sizeof(Elf64_Shdr));
    }

    bool read_tables() {
        if (!holds(0, sizeof header_)) {
            return false;
        }
        header_ = value_at<Elf64_Ehdr>(bytes_, 0);
        if (header_.e_ident[EI_CLASS] != ELFCLASS64 || header_.e_ident[EI_DATA] != ELFDATA2LSB ||
            header_.e_machine != kCudaMachine) {
            return fail("not a 64-bit ELF file of NVIDIA's");
        }
        if (header_.e_shoff == 0 || header_.e_shentsize != sizeof(Elf64_Shdr) ||
            !holds(header_.e_shoff, 1, sizeof(Elf64_Shdr))) {
            return fail("no section headers");
        }
        // Counts that are too large for the header are in the first section's (elf(5)).
        const Elf64_Shdr first = section(0);
        count_ = header_.e_shnum != 0 ? header_.e_shnum : first.sh_size;
        name_section_ =
            header_.e_shstrndx != SHN_XINDEX ? header_.e_shstrndx : uint64_t{first.sh_link};
        const uint64_t segments =
            header_.e_phnum != PN_XNUM ? header_.e_phnum : uint64_t{first.sh_info};
        if (!holds(header_.e_shoff, count_, sizeof(Elf64_Shdr)) ||
            !holds(header_.e_phoff, segments, sizeof(Elf64_Phdr))) {
            return false;
        }
        for (uint64_t i = 1; i < count_; ++i) {
            const Elf64_Shdr s = section(i);
            const bool empty = s.sh_type == SHT_NULL || s.sh_type == SHT_NOBITS ||
                               s.sh_type == kGlobal || s.sh_type == kLocal ||
                               s.sh_type == kShared || s.sh_type == kReservedShared;
            if (!empty && !holds(s.sh_offset, s.sh_size)) {
                return false;
            }
        }
        return true;
    }

    // A string of a string table; empty where there is none.
    std::string_view string(uint64_t table, uint64_t offset) const {
        if (table >= count_) {
            return {};
        }
        const Elf64_Shdr s = section(table);
        if (s.sh_type != SHT_STRTAB || offset >= s.sh_size) {
            return {};
        }
        const std::string_view rest = bytes_.substr(s.sh_offset + offset, s.sh_size - offset);
        return rest.substr(0, rest.find('\0'));
    }

    struct Span {
        uint64_t start, end;
        std::string_view name;
    };

    struct Storage {
        Elf64_Shdr header;
        bool variables = false;        // .nv.global, .nv.global.init, .nv.constant3
        bool written = false;          // by kernels: not the constants
        bool reached_as_whole = false; // by relocations that name no variable
        std::vector<Span> named;
    };

    void read_storage() {
        const auto is = [](std::string_view name, std::string_view wanted) {
            return name.substr(0, wanted.size()) == wanted &&
                   (name.size() == wanted.size() || name[wanted.size()] == '.');
        };
        storage_.resize(count_);
        for (uint64_t i = 1; i < count_; ++i) {
            Storage& storage = storage_[i];
            storage.header = section(i);
            const std::string_view name = string(name_section_, storage.header.sh_name);
            storage.written = is(name, ".nv.global");
            storage.variables = storage.written || is(name, ".nv.constant3");
        }
    }

    bool read_names(Variables* variables) {
        read_storage();
        for (uint64_t i = 1; i < count_; ++i) {
            if (storage_[i].header.sh_type == SHT_SYMTAB && !read_symbols(i, variables)) {
                return false;
            }
        }
        for (Storage& storage : storage_) {
            std::sort(storage.named.begin(), storage.named.end(),
                      [](const Span& a, const Span& b) { return a.start < b.start; });
        }
        for (uint64_t i = 1; i < count_; ++i) {
            read_relocations(storage_[i].header, &variables->addresses);
        }
        // Code reaches variables by relocations alone, and what none leads to is as it was loaded:
        // NCCL 2.32 has tables without a name that none of its code uses any more.
        for (const Storage& storage : storage_) {
            if (storage.written && storage.reached_as_whole && !all_named(storage)) {
                return fail("memory in .nv.global that no symbol names");
            }
        }
        return true;
    }

    void read_relocations(const Elf64_Shdr& table, std::vector<AddressField>* found) {
        const uint64_t entry = table.sh_type == SHT_RELA  ? sizeof(Elf64_Rela)
                               : table.sh_type == SHT_REL ? sizeof(Elf64_Rel)
                                                          : 0;
        if (entry == 0 || table.sh_size == 0) {
            return;
        }
        if (table.sh_link >= count_ || storage_[table.sh_link].header.sh_type != SHT_SYMTAB) {
            for (Storage& storage : storage_) {
                storage.reached_as_whole = true;
            }
            return;
        }
        for (uint64_t at = 0; at + entry <= table.sh_size; at += entry) {
            const auto one = value_at<Elf64_Rel>(bytes_, table.sh_offset + at);
            const auto symbol =
                value_at<Elf64_Sym>(bytes_, storage_[table.sh_link].header.sh_offset +
                                                ELF64_R_SYM(one.r_info) * sizeof(Elf64_Sym));
            const auto type = ELF64_ST_TYPE(symbol.st_info);
            const bool whole = type == STT_SECTION && symbol.st_shndx < count_;
            const bool code =
                type == STT_FUNC ||
                (whole && (storage_[symbol.st_shndx].header.sh_flags & SHF_EXECINSTR) != 0);
            if (whole) {
                storage_[symbol.st_shndx].reached_as_whole = true;
            }
            if (table.sh_info < count_) {
                add_address(storage_[table.sh_info].named, one.r_offset, code, found);
            }
        }
    }

    static void add_address(const std::vector<Span>& named, uint64_t offset, bool code,
                            std::vector<AddressField>* found) {
        auto one = std::upper_bound(named.begin(), named.end(), offset,
                                    [](uint64_t at, const Span& span) { return at < span.start; });
        if (one != named.begin() && offset < (--one)->end) {
            found->push_back({std::string(one->name), offset - one->start, code});
        }
    }

    bool read_symbols(uint64_t table, Variables* variables) {
        const Elf64_Shdr& header = storage_[table].header;
        const uint64_t indices = long_indices(table);
        for (uint64_t i = 0; i < header.sh_size / sizeof(Elf64_Sym); ++i) {
            const auto symbol =
                value_at<Elf64_Sym>(bytes_, header.sh_offset + i * sizeof(Elf64_Sym));
            const auto type = ELF64_ST_TYPE(symbol.st_info);
            variables->heap |= type == STT_FUNC && symbol.st_shndx == SHN_UNDEF &&
                               string(header.sh_link, symbol.st_name) == "malloc";
            if (type != STT_OBJECT && type != STT_COMMON && type != kCudaObject) {
                continue;
            }
            uint64_t home = symbol.st_shndx;
            if (home == SHN_XINDEX) {
                home = value_at<uint32_t>(bytes_, indices + i * sizeof(uint32_t));
            }
            // The linker places a .common variable, so its symbol has no section here.
            const bool common = symbol.st_shndx == SHN_COMMON;
            if (!common && (home >= count_ || !storage_[home].variables)) {
                continue;
            }
            const std::string_view name = string(header.sh_link, symbol.st_name);
            if (name.empty()) {
                return fail("a variable without a name");
            }
            variables->names.emplace_back(name);
            variables->managed |= (symbol.st_other & kManaged) != 0;
            if (!common && !storage_[home].written) {
                variables->constants.emplace_back(name);
            }
            if (!common) {
                const uint64_t start = symbol.st_value - storage_[home].header.sh_addr;
                storage_[home].named.push_back({start, start + symbol.st_size, name});
            }
        }
        return true;
    }

    bool has_code() const {
        return std::any_of(storage_.begin(), storage_.end(), [&](const Storage& one) {
            return one.header.sh_flags & SHF_EXECINSTR ||
                   string(name_section_, one.header.sh_name).find(".text") !=
                       std::string_view::npos;
        });
    }

    // In a variable's first value: the driver fills them in.
    bool has_addresses() const {
        return std::any_of(storage_.begin(), storage_.end(), [&](const Storage& one) {
            const uint32_t target = one.header.sh_info;
            return (one.header.sh_type == SHT_REL || one.header.sh_type == SHT_RELA) &&
                   (target >= count_ || storage_[target].variables);
        });
    }

    // Where the section numbers are that do not fit into the symbols of a table.
    uint64_t long_indices(uint64_t table) const {
        for (const Storage& storage : storage_) {
            if (storage.header.sh_type == SHT_SYMTAB_SHNDX && storage.header.sh_link == table) {
                return storage.header.sh_offset;
            }
        }
        return bytes_.size();
    }

    // A gap as large as the section's alignment is no padding.
    static bool all_named(const Storage& storage) {
        const uint64_t padding = std::max<uint64_t>(storage.header.sh_addralign, 1);
        uint64_t at = 0;
        for (const Span& span : storage.named) {
            if (span.start > at && span.start - at >= padding) {
                return false;
            }
            at = std::max(at, span.end);
        }
        return at >= storage.header.sh_size || storage.header.sh_size - at < padding;
    }

    std::string_view bytes_;
    Elf64_Ehdr header_{};
    uint64_t count_ = 0;
    uint64_t name_section_ = 0;
    uint64_t end_ = 0;
    std::vector<Storage> storage_;
    std::string why_;
};

} // namespace

bool cubin_variables(std::string_view bytes, size_t* size, Variables* variables, std::string* why) {
    return Cubin(bytes).run(size, variables, why);
}

} // namespace flowgpu
