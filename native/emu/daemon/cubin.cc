// The emulated linker's cubins: PTX text in an ELF file whose sections and symbols of variables are
// those of a whole-program cubin of ptxas.
//
//   .emu.ptx          the text, which is what runs
//   .emu.slots        the symbol of each slot of .nv.constant4, 32 bits each
//   .nv.constant4     a slot of 8 bytes for each .global variable: the address that kernels use,
//                     unless .rela.nv.constant4 says that it is the driver's to choose
//   .nv.global.init, .nv.global, .nv.constant3
//                     the variables; in .rela of the first and the last, the addresses in them
//   .text.FUNCTION    nothing that runs; readers see that there is code
//
// The section headers end the file.
#include "image.h"

#include "fatbin.h"

#include <algorithm>
#include <cstring>
#include <elf.h>
#include <map>

namespace flowgpu::emu {

namespace {

using fatbin::value_at;

constexpr uint16_t kCudaMachine = 190;
// In a header's flags: of the code, and of the instruction set that it was compiled from.
constexpr uint32_t kArchitecture = 0xff, kOfVirtual = 1 << 16;
constexpr uint32_t kCudaFlags = 0x500; // 64-bit addresses
constexpr unsigned char kCudaAbi = 0x33;
constexpr unsigned char kManaged = 0x4; // in a symbol's st_other
constexpr unsigned char kEntry = 0x10;
// Relocation types. Those of a function's and of a kernel's address are what ptxas 13.0 writes.
constexpr uint32_t kSlotAddress = 2;
constexpr uint32_t kValueAddress = 4;
constexpr uint32_t kFunctionAddress = 2;
constexpr uint32_t kKernelAddress = 35;
constexpr uint64_t kSlotBytes = sizeof(uint64_t);
constexpr size_t kCodeBytes = 16; // of each function, all zeros
constexpr const char* kText = ".emu.ptx";
constexpr const char* kSlots = ".emu.slots";
constexpr const char* kConstants = ".nv.constant3";
constexpr const char* kAddresses = ".nv.constant4";
constexpr const char* kFilled = ".nv.global.init";
constexpr const char* kZeroed = ".nv.global";

template <class T> std::string_view bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// The type of the relocation that a variable begins with; null: an address of a variable.
uint32_t address_type(const ptx::Function* of) {
    return of == nullptr ? kValueAddress : of->entry ? kKernelAddress : kFunctionAddress;
}

class ElfWriter {
  public:
    explicit ElfWriter(uint32_t architecture) : architecture_(architecture) {
        sections_.emplace_back();
    }

    // The index of the section, whose contents may still be written until finish().
    uint32_t add(const std::string& name, uint32_t type, uint64_t flags, uint64_t align,
                 std::string_view contents, uint64_t entry_bytes = 0) {
        Section section;
        section.header.sh_name = string(&names_, name);
        section.header.sh_type = type;
        section.header.sh_flags = flags;
        section.header.sh_addralign = align;
        section.header.sh_size = contents.size();
        section.header.sh_entsize = entry_bytes;
        section.contents = contents;
        sections_.push_back(std::move(section));
        return static_cast<uint32_t>(sections_.size() - 1);
    }

    Elf64_Shdr& header(uint32_t section) { return sections_[section].header; }

    static uint32_t string(std::string* table, const std::string& text) {
        const size_t at = table->size();
        table->append(text).push_back('\0');
        return static_cast<uint32_t>(at);
    }

    // Empty where there are too many sections.
    std::string finish() {
        const uint32_t names = add(".shstrtab", SHT_STRTAB, 0, 1, {});
        sections_[names].contents = names_;
        header(names).sh_size = names_.size();
        if (sections_.size() >= SHN_LORESERVE) {
            return {};
        }
        std::string file(sizeof(Elf64_Ehdr), '\0');
        for (Section& section : sections_) {
            file.resize(align(file.size(), section.header.sh_addralign));
            section.header.sh_offset = section.header.sh_type == SHT_NULL ? 0 : file.size();
            file += section.contents;
        }
        file.resize(align(file.size(), alignof(Elf64_Shdr)));
        Elf64_Ehdr head{};
        std::memcpy(head.e_ident, ELFMAG, SELFMAG);
        head.e_ident[EI_CLASS] = ELFCLASS64;
        head.e_ident[EI_DATA] = ELFDATA2LSB;
        head.e_ident[EI_VERSION] = EV_CURRENT;
        head.e_ident[EI_OSABI] = kCudaAbi;
        head.e_type = ET_EXEC;
        head.e_machine = kCudaMachine;
        head.e_version = EV_CURRENT;
        head.e_flags = kCudaFlags | architecture_ | architecture_ * kOfVirtual;
        head.e_shoff = file.size();
        head.e_ehsize = sizeof head;
        head.e_shentsize = sizeof(Elf64_Shdr);
        head.e_shnum = static_cast<uint16_t>(sections_.size());
        head.e_shstrndx = static_cast<uint16_t>(names);
        std::memcpy(file.data(), &head, sizeof head);
        for (const Section& section : sections_) {
            file.append(reinterpret_cast<const char*>(&section.header), sizeof section.header);
        }
        return file;
    }

    static uint64_t align(uint64_t size, uint64_t to) {
        return to < 2 ? size : (size + to - 1) / to * to;
    }

  private:
    struct Section {
        Elf64_Shdr header{};
        std::string contents;
    };
    const uint32_t architecture_;
    std::vector<Section> sections_;
    std::string names_ = std::string(1, '\0');
};

class CubinWriter {
  public:
    CubinWriter(std::string_view text, const ptx::Module& code, uint32_t architecture)
        : text_(text), code_(code), elf_(architecture) {}

    std::string write() {
        elf_.add(kText, SHT_PROGBITS, 0, 1, text_);
        place_variables();
        for (const ptx::Function& function : code_.functions()) {
            const uint32_t home =
                elf_.add(".text." + function.name, SHT_PROGBITS, SHF_ALLOC | SHF_EXECINSTR,
                         kCodeBytes, std::string(kCodeBytes, '\0'));
            global_.push_back(symbol(function.name, STB_GLOBAL, STT_FUNC, home, 0, kCodeBytes));
            global_.back().st_other = function.entry ? kEntry : 0;
        }
        write_symbols();
        write_relocations();
        return elf_.finish();
    }

  private:
    struct Home {
        uint32_t section = 0;
        uint64_t align = 1;
        uint64_t size = 0;
        std::string contents;
        std::vector<size_t> variables;
    };

    const char* home_of(const ptx::Variable& variable) const {
        const bool zeros =
            variable.relocs.empty() && std::all_of(variable.init.begin(), variable.init.end(),
                                                   [](uint8_t byte) { return byte == 0; });
        return variable.constant ? kConstants : zeros ? kZeroed : kFilled;
    }

    void place_variables() {
        const auto& variables = code_.variables();
        offsets_.resize(variables.size());
        for (size_t i = 0; i < variables.size(); ++i) {
            const ptx::Variable& variable = variables[i];
            Home& home = homes_[home_of(variable)];
            home.align = std::max<uint64_t>(home.align, variable.align);
            offsets_[i] = ElfWriter::align(home.size, variable.align);
            home.size = offsets_[i] + variable.size;
            home.variables.push_back(i);
            if (home_of(variable) != kZeroed) {
                home.contents.resize(home.size);
                std::copy(variable.init.begin(), variable.init.end(),
                          home.contents.begin() + static_cast<std::ptrdiff_t>(offsets_[i]));
                for (const auto& reloc : variable.relocs) {
                    std::memset(home.contents.data() + offsets_[i] + reloc.offset, 0, kSlotBytes);
                }
            }
            slots_ += variable.constant ? 0 : 1;
        }
        for (auto& [name, home] : homes_) {
            const bool zeroed = name == kZeroed;
            home.section = elf_.add(name, zeroed ? SHT_NOBITS : SHT_PROGBITS,
                                    SHF_ALLOC | (name == kConstants ? 0u : SHF_WRITE), home.align,
                                    home.contents);
            elf_.header(home.section).sh_size = home.size;
            for (const size_t i : home.variables) {
                const unsigned bind = variables[i].visible ? STB_GLOBAL : STB_LOCAL;
                auto& table = variables[i].visible ? global_ : local_;
                table.push_back(symbol(variables[i].name, bind, STT_OBJECT, home.section,
                                       offsets_[i], variables[i].size));
                table.back().st_other = variables[i].managed ? kManaged : 0;
            }
        }
        if (slots_ != 0) {
            addresses_ = elf_.add(kAddresses, SHT_PROGBITS, SHF_ALLOC, kSlotBytes,
                                  std::string(slots_ * kSlotBytes, '\0'));
        }
    }

    Elf64_Sym symbol(const std::string& name, unsigned bind, unsigned type, uint32_t home,
                     uint64_t value, uint64_t size) {
        Elf64_Sym out{};
        out.st_name = ElfWriter::string(&strings_, name);
        out.st_info = static_cast<unsigned char>(ELF64_ST_INFO(bind, type));
        out.st_shndx = static_cast<uint16_t>(home);
        out.st_value = value;
        out.st_size = size;
        names_.emplace(out.st_name, name);
        return out;
    }

    void write_symbols() {
        std::vector<Elf64_Sym> all(1);
        all.insert(all.end(), local_.begin(), local_.end());
        all.insert(all.end(), global_.begin(), global_.end());
        for (size_t i = 1; i < all.size(); ++i) {
            numbers_[names_[all[i].st_name]] = static_cast<uint32_t>(i);
        }
        const uint32_t strings = elf_.add(".strtab", SHT_STRTAB, 0, 1, strings_);
        symbols_ = elf_.add(".symtab", SHT_SYMTAB, 0, alignof(Elf64_Sym), bytes_of(all),
                            sizeof(Elf64_Sym));
        elf_.header(symbols_).sh_link = strings;
        elf_.header(symbols_).sh_info = static_cast<uint32_t>(local_.size() + 1);
    }

    void add_relocations(const std::string& of, uint32_t target,
                         const std::vector<Elf64_Rela>& entries) {
        if (!entries.empty()) {
            const uint32_t section = elf_.add(".rela" + of, SHT_RELA, 0, alignof(Elf64_Rela),
                                              bytes_of(entries), sizeof(Elf64_Rela));
            elf_.header(section).sh_link = symbols_;
            elf_.header(section).sh_info = target;
        }
    }

    void write_relocations() {
        std::vector<uint32_t> slots;
        std::vector<Elf64_Rela> entries;
        for (const ptx::Variable& variable : code_.variables()) {
            if (!variable.constant) {
                const uint64_t number = numbers_[variable.name];
                entries.push_back(
                    {slots.size() * kSlotBytes, ELF64_R_INFO(number, kSlotAddress), 0});
                slots.push_back(static_cast<uint32_t>(number));
            }
        }
        if (!slots.empty()) {
            elf_.add(kSlots, SHT_PROGBITS, 0, sizeof(uint32_t), bytes_of(slots));
            add_relocations(kAddresses, addresses_, entries);
        }
        for (const auto& [name, home] : homes_) {
            entries.clear();
            for (const size_t i : home.variables) {
                const ptx::Variable& variable = code_.variables()[i];
                for (const auto& reloc : variable.relocs) {
                    int64_t addend;
                    std::memcpy(&addend, variable.init.data() + reloc.offset, sizeof addend);
                    const uint64_t number = numbers_[reloc.symbol];
                    const ptx::Function* function = code_.find(reloc.symbol);
                    entries.push_back({offsets_[i] + reloc.offset,
                                       ELF64_R_INFO(number, address_type(function)), addend});
                }
            }
            add_relocations(name, home.section, entries);
        }
    }

    std::string_view text_;
    const ptx::Module& code_;
    ElfWriter elf_;
    std::map<std::string, Home> homes_;
    std::vector<uint64_t> offsets_; // of each variable in its home
    size_t slots_ = 0;
    uint32_t addresses_ = 0, symbols_ = 0; // sections
    std::vector<Elf64_Sym> local_, global_;
    std::string strings_ = std::string(1, '\0');
    std::map<uint32_t, std::string> names_;   // by their place in strings_
    std::map<std::string, uint32_t> numbers_; // of the symbols
};

class CubinReader {
  public:
    explicit CubinReader(std::string_view bytes)
        : bytes_(bytes), header_(value_at<Elf64_Ehdr>(bytes, 0)) {
        const bool known = std::memcmp(header_.e_ident, ELFMAG, SELFMAG) == 0 &&
                           header_.e_ident[EI_CLASS] == ELFCLASS64 &&
                           header_.e_ident[EI_DATA] == ELFDATA2LSB &&
                           header_.e_machine == kCudaMachine && header_.e_type == ET_EXEC &&
                           header_.e_shentsize == sizeof(Elf64_Shdr) &&
                           inside(header_.e_shoff, header_.e_shnum * sizeof(Elf64_Shdr));
        for (uint32_t i = 0; known && i < header_.e_shnum; ++i) {
            sections_.push_back(
                value_at<Elf64_Shdr>(bytes, header_.e_shoff + i * sizeof(Elf64_Shdr)));
        }
    }

    std::string_view text() const {
        const uint32_t section = find(kText);
        return section == 0 ? std::string_view() : contents(section);
    }

    bool read(const ptx::Module& code, std::vector<Image::Variable>* variables, std::string* why) {
        variables->assign(code.variables().size(), {});
        offsets_.resize(code.variables().size());
        homes_.resize(code.variables().size());
        const bool ok = check_tables() && read_symbols(code, variables) &&
                        read_relocations(code, variables) && read_slots(code, variables);
        *why = "cubin: " + why_;
        return ok;
    }

  private:
    static constexpr size_t kNone = SIZE_MAX;

    bool fail(const std::string& what) {
        why_ = what;
        return false;
    }

    bool inside(uint64_t offset, uint64_t size) const {
        return offset <= bytes_.size() && size <= bytes_.size() - offset;
    }

    // Empty for what has no bytes in the file, or not all of them.
    std::string_view contents(uint32_t section) const {
        const Elf64_Shdr& s = sections_[section];
        return s.sh_type != SHT_NOBITS && inside(s.sh_offset, s.sh_size)
                   ? bytes_.substr(s.sh_offset, s.sh_size)
                   : std::string_view();
    }

    std::string_view string(uint32_t table, uint64_t offset) const {
        const std::string_view all =
            table < sections_.size() ? contents(table) : std::string_view();
        const std::string_view rest = all.substr(std::min<uint64_t>(offset, all.size()));
        return rest.substr(0, rest.find('\0'));
    }

    uint32_t find(std::string_view name) const {
        for (uint32_t i = 1; i < sections_.size(); ++i) {
            if (string(header_.e_shstrndx, sections_[i].sh_name) == name) {
                return i;
            }
        }
        return 0;
    }

    bool check_tables() {
        for (size_t i = 1; i < sections_.size(); ++i) {
            const Elf64_Shdr& s = sections_[i];
            if (s.sh_type != SHT_NOBITS && !inside(s.sh_offset, s.sh_size)) {
                return fail("a table lies outside of it");
            }
        }
        symbols_ = find(".symtab");
        constants_ = find(kConstants);
        filled_ = find(kFilled);
        zeroed_ = find(kZeroed);
        addresses_ = find(kAddresses);
        return symbols_ != 0 && sections_[symbols_].sh_type == SHT_SYMTAB ? true
                                                                          : fail("no symbol table");
    }

    bool read_symbols(const ptx::Module& code, std::vector<Image::Variable>* variables) {
        std::map<std::string_view, size_t> missing;
        for (size_t i = 0; i < code.variables().size(); ++i) {
            missing[code.variables()[i].name] = i;
        }
        const std::string_view table = contents(symbols_);
        variable_of_.assign(table.size() / sizeof(Elf64_Sym), kNone);
        function_of_.assign(variable_of_.size(), nullptr);
        for (size_t i = 0; i < variable_of_.size(); ++i) {
            const auto symbol = value_at<Elf64_Sym>(table, i * sizeof(Elf64_Sym));
            const std::string name(string(sections_[symbols_].sh_link, symbol.st_name));
            if (symbol.st_shndx == SHN_ABS) {
                return fail(name + " is an address and no place in a section");
            }
            if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) {
                function_of_[i] = code.find(name);
            }
            if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT) {
                continue;
            }
            const auto found = missing.find(name);
            if (found == missing.end()) {
                return fail(name + " is no variable of its code, or twice a symbol");
            }
            const size_t variable = found->second;
            missing.erase(found);
            variable_of_[i] = variable;
            homes_[variable] = symbol.st_shndx;
            offsets_[variable] = symbol.st_value;
            if (!take_first_value(symbol, code.variables()[variable], &(*variables)[variable])) {
                return fail(name + " does not lie in a section for it");
            }
        }
        return missing.empty() ? true
                               : fail(std::string(missing.begin()->first) + " has no symbol");
    }

    bool take_first_value(const Elf64_Sym& symbol, const ptx::Variable& variable,
                          Image::Variable* out) const {
        const uint32_t home = symbol.st_shndx;
        const bool right =
            variable.constant ? home == constants_ : home == filled_ || home == zeroed_;
        if (!right || home == 0 || symbol.st_size != variable.size) {
            return false;
        }
        const Elf64_Shdr& section = sections_[home];
        if (symbol.st_value > section.sh_size ||
            symbol.st_size > section.sh_size - symbol.st_value) {
            return false;
        }
        if (section.sh_type != SHT_NOBITS) {
            const std::string_view value = contents(home).substr(symbol.st_value, symbol.st_size);
            out->init.assign(value.begin(), value.end());
        }
        return true;
    }

    bool read_relocations(const ptx::Module& code, std::vector<Image::Variable>* variables) {
        for (uint32_t i = 1; i < sections_.size(); ++i) {
            const Elf64_Shdr& section = sections_[i];
            if (section.sh_type == SHT_REL) {
                return fail("relocations without addends");
            }
            if (section.sh_type != SHT_RELA) {
                continue;
            }
            if (section.sh_link != symbols_ || section.sh_entsize != sizeof(Elf64_Rela) ||
                section.sh_size % sizeof(Elf64_Rela) != 0) {
                return fail("a table of relocations of another form");
            }
            for (uint64_t at = 0; at < section.sh_size; at += sizeof(Elf64_Rela)) {
                const auto entry = value_at<Elf64_Rela>(contents(i), at);
                if (!take_relocation(code, section.sh_info, entry, variables)) {
                    return fail("relocation " + std::to_string(at / sizeof(Elf64_Rela)) + " of " +
                                std::string(string(header_.e_shstrndx, section.sh_name)) +
                                " cannot be resolved");
                }
            }
        }
        return true;
    }

    bool take_relocation(const ptx::Module& code, uint32_t target, const Elf64_Rela& entry,
                         std::vector<Image::Variable>* variables) {
        const uint64_t symbol = ELF64_R_SYM(entry.r_info);
        const size_t to = symbol < variable_of_.size() ? variable_of_[symbol] : kNone;
        const ptx::Function* function =
            symbol < function_of_.size() ? function_of_[symbol] : nullptr;
        const uint64_t type = ELF64_R_TYPE(entry.r_info);
        if ((to == kNone && function == nullptr) || target == 0) {
            return false;
        }
        if (target == addresses_) {
            bound_[entry.r_offset] = to;
            return type == kSlotAddress && entry.r_addend == 0 && to != kNone;
        }
        if (type != address_type(function) || (target != filled_ && target != constants_)) {
            return false;
        }
        const size_t index =
            function == nullptr ? to : code.code_offset(*function) / ptx::function_bytes;
        for (size_t i = 0; i < variables->size(); ++i) {
            const uint64_t offset = entry.r_offset - offsets_[i];
            if (homes_[i] == target && entry.r_offset >= offsets_[i] &&
                code.variables()[i].size >= kSlotBytes &&
                offset <= code.variables()[i].size - kSlotBytes) {
                (*variables)[i].relocs.push_back(
                    {offset, function != nullptr, index, static_cast<uint64_t>(entry.r_addend)});
                return true;
            }
        }
        return false;
    }

    bool read_slots(const ptx::Module& code, std::vector<Image::Variable>* variables) {
        std::vector<bool> known(variables->size());
        const uint32_t section = find(kSlots);
        const std::string_view slots = section == 0 ? std::string_view() : contents(section);
        const std::string_view addresses =
            addresses_ == 0 ? std::string_view() : contents(addresses_);
        const uint64_t count = slots.size() / sizeof(uint32_t);
        if (addresses.size() != count * kSlotBytes) {
            return fail("not a symbol for each slot of .nv.constant4");
        }
        for (uint64_t i = 0; i < count; ++i) {
            const auto symbol = value_at<uint32_t>(slots, i * sizeof(uint32_t));
            const size_t variable = symbol < variable_of_.size() ? variable_of_[symbol] : kNone;
            const auto bound = bound_.find(i * kSlotBytes);
            if (variable == kNone || (bound != bound_.end() && bound->second != variable)) {
                return fail("slot " + std::to_string(i) + " of .nv.constant4 is of no variable");
            }
            known[variable] = true;
            if (bound == bound_.end()) {
                (*variables)[variable].elsewhere = value_at<uint64_t>(addresses, i * kSlotBytes);
            } else {
                bound_.erase(bound);
            }
        }
        for (size_t i = 0; i < known.size(); ++i) {
            if (!known[i] && !code.variables()[i].constant) {
                return fail(code.variables()[i].name + " has no slot in .nv.constant4");
            }
        }
        return bound_.empty() ? true : fail("a relocation beyond .nv.constant4");
    }

    std::string_view bytes_;
    Elf64_Ehdr header_;
    std::vector<Elf64_Shdr> sections_;
    uint32_t symbols_ = 0, constants_ = 0, filled_ = 0, zeroed_ = 0, addresses_ = 0;
    std::vector<size_t> variable_of_; // by symbol
    std::vector<const ptx::Function*> function_of_;
    std::vector<uint32_t> homes_; // of the variables: their sections, and where in them
    std::vector<uint64_t> offsets_;
    std::map<uint64_t, size_t> bound_; // slots by their offsets, and what is to be in them
    std::string why_;
};

} // namespace

bool is_linked(std::string_view bytes) {
    return !text_of(bytes).empty();
}

std::string_view text_of(std::string_view cubin) {
    return CubinReader(cubin).text();
}

uint32_t architecture_of(std::string_view cubin) {
    return value_at<Elf64_Ehdr>(cubin, 0).e_flags & kArchitecture;
}

std::string write_cubin(std::string_view text, const ptx::Module& code, uint32_t architecture) {
    return CubinWriter(text, code, architecture).write();
}

bool read_variables(std::string_view cubin, const ptx::Module& code,
                    std::vector<Image::Variable>* variables, std::string* why) {
    return CubinReader(cubin).read(code, variables, why);
}

} // namespace flowgpu::emu
