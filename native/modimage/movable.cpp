// Sections, symbols and relocations as ptxas and NVRTC of CUDA 13 write them for sm_75 to sm_120,
// found with readelf.
#include "movable.h"

#include <algorithm>
#include <cstddef>
#include <elf.h>
#include <string_view>
#include <utility>

#include "fatbin.h"
#include "forms.h"

namespace flowgpu {

namespace {

using fatbin::value_at;

constexpr uint32_t kElfMagic = 0x464c457f;
// Flags of an entry in a fat binary. Code for sm_90a and the like runs on that GPU alone, code for
// sm_100f on its family.
constexpr uint64_t kFlagExact = 0x100000;
constexpr uint64_t kFlagFamily = 0x200000;

// What follows of a relocation's kind. 64-bit addresses, the second one generic, which is the same
// for these variables; halves of an address in the upper half of an instruction's first 8 bytes.
enum : uint32_t { kAddress = 2, kGenericAddress = 4, kKernel = 35, kLow = 56, kHigh = 57 };
constexpr uint64_t kImmediateAt = 4;

constexpr uint64_t kLeastAlignment = 16;
constexpr uint64_t kMostAlignment = 512;
// No GPU's memory holds as much; sums of a few such numbers cannot overflow.
constexpr uint64_t kMostBytes = uint64_t{1} << 40;

bool begins_with(std::string_view text, std::string_view start) {
    return text.substr(0, start.size()) == start;
}

// The code for sm_100 and later once more, for the driver's own compiler; relocations that nvlink
// keeps on request although they are resolved.
bool has_references_of_its_own(std::string_view section) {
    return begins_with(section, ".nv.merc.") || begins_with(section, ".nv.capmerc.") ||
           begins_with(section, ".nv.resolvedrel");
}

ChosenCode none(const std::string& why) {
    return {ChosenCode::Form::none, {}, why};
}

bool runs(const fatbin::Entry& entry, unsigned major, unsigned minor) {
    const bool same_major = entry.architecture / 10 == major;
    if ((entry.flags & kFlagExact) != 0) {
        return same_major && entry.architecture % 10 == minor;
    }
    if (entry.kind == fatbin::kCubin || (entry.flags & kFlagFamily) != 0) {
        return same_major && entry.architecture % 10 <= minor;
    }
    return entry.kind == fatbin::kPtx && entry.architecture <= major * 10 + minor;
}

ChosenCode choose_entry(std::string_view container, unsigned major, unsigned minor) {
    fatbin::Entry best;
    size_t equals = 0;
    fatbin::Entries entries(container);
    for (fatbin::Entry entry; entries.next(&entry);) {
        if (!runs(entry, major, minor)) {
            continue;
        }
        // Any cubin goes before PTX.
        const bool better = entry.kind != best.kind ? equals == 0 || entry.kind == fatbin::kCubin
                                                    : entry.architecture > best.architecture;
        if (better) {
            best = entry;
            equals = 1;
        } else if (entry.kind == best.kind && entry.architecture == best.architecture) {
            ++equals;
        }
    }
    if (equals != 1) {
        const std::string gpu = std::to_string(major) + "." + std::to_string(minor);
        return none(equals == 0
                        ? "the fat binary has no code for compute capability " + gpu
                        : "the fat binary has more than one code for compute capability " + gpu);
    }
    std::string buffer, why;
    std::string_view code;
    if (!fatbin::unpack(best, &buffer, &code, &why)) {
        return none(why);
    }
    if (best.kind == fatbin::kCubin) {
        return {ChosenCode::Form::cubin, std::string(code), {}};
    }
    return {ChosenCode::Form::ptx, std::string(code.substr(0, code.find('\0'))) + '\0', {}};
}

} // namespace

ChosenCode choose_code(const ModuleImage& image, unsigned major, unsigned minor) {
    if (!image.known) {
        return none(image.why);
    }
    if (!image.linked_from.empty()) {
        return none("the driver links the fat binary's code from relocatable parts");
    }
    const auto magic = value_at<uint32_t>(image.bytes, 0);
    if (magic == fatbin::kMagic) {
        return choose_entry(image.bytes, major, minor);
    }
    const auto form = magic == kElfMagic ? ChosenCode::Form::cubin : ChosenCode::Form::ptx;
    return {form, std::string(image.bytes), {}};
}

// All is read before anything is changed: in a damaged cubin tables may overlap.
class MovableCubin::Reader {
  public:
    Reader(MovableCubin* to, Which which) : to_(*to), which_(which), bytes_(to->cubin_) {}

    // False with why().
    bool run() {
        if (value_at<uint32_t>(bytes_, 0) != kElfMagic) {
            return fail("no ELF file");
        }
        Variables variables;
        size_t size = 0;
        // Also: all tables lie within the bytes, and names have all the memory in .nv.global.
        if (!cubin_variables(bytes_, &size, &variables, &to_.why_) || !read_sections()) {
            return false;
        }
        for (uint64_t i = 1; i < sections_.size(); ++i) {
            if (sections_[i].header.sh_type == SHT_SYMTAB && !read_symbols(i)) {
                return false;
            }
        }
        for (uint64_t i = 1; i < sections_.size(); ++i) {
            const uint32_t type = sections_[i].header.sh_type;
            if ((type == SHT_REL || type == SHT_RELA) && !read_relocations(sections_[i], i)) {
                return false;
            }
        }
        for (const Rewrite& rewrite : rewrites_) {
            to_.cubin_.replace(rewrite.at, rewrite.bytes.size(), rewrite.bytes);
        }
        return true;
    }

  private:
    struct Section {
        Elf64_Shdr header;
        std::string_view name;
        bool variables = false;
        bool moves = false, stays = false; // some of them
        uint64_t offset = 0;               // of variables: in the block
    };

    struct Rewrite {
        uint64_t at;
        std::string bytes;
    };

    bool fail(const std::string& what) {
        to_.why_ = "cubin: " + what;
        return false;
    }

    bool read_sections() {
        const auto header = value_at<Elf64_Ehdr>(bytes_, 0);
        if (header.e_type != ET_EXEC) {
            return fail("relocatable code");
        }
        table_ = header.e_shoff;
        // Numbers that are too large for the header are in the first section's (elf(5)).
        const auto first = value_at<Elf64_Shdr>(bytes_, table_);
        sections_.resize(header.e_shnum != 0 ? header.e_shnum : first.sh_size);
        for (uint64_t i = 0; i < sections_.size(); ++i) {
            sections_[i].header = value_at<Elf64_Shdr>(bytes_, table_ + i * sizeof(Elf64_Shdr));
        }
        const uint64_t names =
            header.e_shstrndx != SHN_XINDEX ? header.e_shstrndx : uint64_t{first.sh_link};
        for (Section& section : sections_) {
            section.name = string(names, section.header.sh_name);
            if (has_references_of_its_own(section.name)) {
                return fail(std::string(section.name) + ": references of a form not known");
            }
            section.variables =
                section.name == ".nv.global" || begins_with(section.name, ".nv.global.");
            if (section.variables && !place(&section)) {
                return false;
            }
        }
        return true;
    }

    // The next place in the block for a section of variables.
    bool place(Section* section) {
        const Elf64_Shdr& header = section->header;
        const uint64_t alignment = std::max(header.sh_addralign, kLeastAlignment);
        const bool stored = header.sh_type == SHT_PROGBITS;
        if ((!stored && header.sh_type != SHT_NOBITS) || header.sh_addr != 0) {
            return fail(std::string(section->name) + " is no section of an executable");
        }
        if ((alignment & (alignment - 1)) != 0 || alignment > kMostAlignment) {
            return fail("variables aligned at " + std::to_string(alignment));
        }
        section->offset = (to_.bytes_ + alignment - 1) & ~(alignment - 1);
        if (header.sh_size > kMostBytes - section->offset) {
            return fail("more variables than any GPU holds");
        }
        to_.bytes_ = section->offset + header.sh_size;
        if (stored) {
            to_.stored_.push_back({header.sh_offset, section->offset, header.sh_size});
        }
        return true;
    }

    // A string of a string table; empty where there is none.
    std::string_view string(uint64_t table, uint64_t offset) const {
        if (table >= sections_.size()) {
            return {};
        }
        const Elf64_Shdr& header = sections_[table].header;
        if (header.sh_type != SHT_STRTAB || offset >= header.sh_size) {
            return {};
        }
        const std::string_view rest =
            bytes_.substr(header.sh_offset + offset, header.sh_size - offset);
        return rest.substr(0, rest.find('\0'));
    }

    struct Symbol {
        Elf64_Sym symbol;
        Section* home; // null: in no section of variables
    };

    Symbol symbol(uint64_t table, uint64_t index) {
        const uint64_t at = sections_[table].header.sh_offset + index * sizeof(Elf64_Sym);
        const auto symbol = value_at<Elf64_Sym>(bytes_, at);
        uint64_t home = symbol.st_shndx;
        if (home == SHN_XINDEX) {
            home = long_index(table, index);
        }
        const bool variable = home < sections_.size() && sections_[home].variables;
        return {symbol, variable ? &sections_[home] : nullptr};
    }

    // A section's number that does not fit into the symbol.
    uint64_t long_index(uint64_t table, uint64_t index) const {
        for (const Section& section : sections_) {
            const Elf64_Shdr& header = section.header;
            if (header.sh_type == SHT_SYMTAB_SHNDX && header.sh_link == table) {
                return value_at<uint32_t>(bytes_, header.sh_offset + index * sizeof(uint32_t));
            }
        }
        return 0;
    }

    bool read_symbols(uint64_t table) {
        const Elf64_Shdr& header = sections_[table].header;
        for (uint64_t i = 0; i < header.sh_size / sizeof(Elf64_Sym); ++i) {
            const auto [symbol, home] = this->symbol(table, i);
            const auto type = ELF64_ST_TYPE(symbol.st_info);
            const std::string name(string(header.sh_link, symbol.st_name));
            // vprintf and __assertfail are given addresses of texts among the plain variables,
            // which the driver reads, perhaps from where it has put them.
            if (which_ == Which::plain && symbol.st_shndx == SHN_UNDEF && type == STT_FUNC &&
                name != "malloc" && name != "free") {
                return fail("calls " + name + " of the driver's");
            }
            if (symbol.st_shndx == SHN_COMMON) {
                return fail("variable " + name + " is in no section");
            }
            if (home == nullptr || type == STT_SECTION) {
                continue;
            }
            if (type != STT_OBJECT) {
                return fail(name + " among the variables is none");
            }
            (moves(symbol) ? home->moves : home->stays) = true;
            if (!moves(symbol)) {
                continue;
            }
            if (symbol.st_value > home->header.sh_size ||
                symbol.st_size > home->header.sh_size - symbol.st_value) {
                return fail("variable " + name + " lies outside of its section");
            }
            to_.places_.push_back({name, home->offset + symbol.st_value, symbol.st_size});
        }
        return true;
    }

    bool moves(const Elf64_Sym& variable) const {
        return ((variable.st_other & kManaged) != 0) == (which_ == Which::managed);
    }

    // The variable that moves and begins with these bytes of a section; null: there is none.
    const Place* place_at(const Section& section, uint64_t at) const {
        const uint64_t offset = section.offset + at;
        const auto found =
            std::find_if(to_.places_.begin(), to_.places_.end(), [=](const Place& place) {
                return place.offset <= offset && offset < place.offset + place.bytes;
            });
        return section.variables && found != to_.places_.end() ? &*found : nullptr;
    }

    // Makes fields of the relocations in a table that lead to variables, and a shorter table.
    bool read_relocations(const Section& table, uint64_t index) {
        const Elf64_Shdr& header = table.header;
        const uint64_t entry = header.sh_type == SHT_RELA ? sizeof(Elf64_Rela) : sizeof(Elf64_Rel);
        if (header.sh_size == 0) {
            return true;
        }
        if (header.sh_entsize != entry || header.sh_size % entry != 0 ||
            header.sh_info >= sections_.size() || header.sh_link >= sections_.size() ||
            sections_[header.sh_link].header.sh_type != SHT_SYMTAB) {
            return fail(std::string(table.name) + " is no table of relocations");
        }
        const Section& target = sections_[header.sh_info];
        // For debuggers. A kernel's name may hold "debug" as well, behind .text. or .nv.constant.
        if (begins_with(target.name, ".debug") || begins_with(target.name, ".nv_debug")) {
            return true;
        }
        std::string kept;
        for (uint64_t at = 0; at < header.sh_size; at += entry) {
            Elf64_Rela one = value_at<Elf64_Rela>(bytes_, header.sh_offset + at);
            if (header.sh_type == SHT_REL) {
                one.r_addend = 0;
            }
            bool taken = false;
            if (!read_relocation(table, target, one, &taken)) {
                return false;
            }
            if (!taken) {
                kept += bytes_.substr(header.sh_offset + at, entry);
            }
        }
        if (kept.size() != header.sh_size) {
            const uint64_t size = kept.size();
            const uint64_t at = table_ + index * sizeof(Elf64_Shdr) + offsetof(Elf64_Shdr, sh_size);
            rewrites_.push_back({header.sh_offset, std::move(kept)});
            rewrites_.push_back({at, {reinterpret_cast<const char*>(&size), sizeof size}});
        }
        return true;
    }

    bool read_relocation(const Section& table, const Section& target, const Elf64_Rela& one,
                         bool* taken) {
        const uint64_t index = ELF64_R_SYM(one.r_info);
        const uint32_t type = ELF64_R_TYPE(one.r_info);
        const uint32_t symbols = table.header.sh_link;
        const auto refuse = [&](const std::string& why) {
            return fail("relocation of type " + std::to_string(type) + " in " +
                        std::string(table.name) + ": " + why);
        };
        if (index >= sections_[symbols].header.sh_size / sizeof(Elf64_Sym)) {
            return refuse("no symbol");
        }
        const auto [symbol, home] = this->symbol(symbols, index);
        const bool whole = ELF64_ST_TYPE(symbol.st_info) == STT_SECTION;
        if (whole && home != nullptr && home->moves && home->stays) {
            return refuse("which of a section's variables it is for is not known");
        }
        if (home == nullptr || (whole ? home->stays : !moves(symbol))) {
            // The driver puts it into its own variable.
            const Place* place = place_at(target, one.r_offset);
            if (place == nullptr) {
                return true;
            }
            if (which_ != Which::plain || ELF64_ST_TYPE(symbol.st_info) != STT_FUNC ||
                (type != kAddress && type != kKernel)) {
                return refuse("what a variable begins with is not known");
            }
            to_.code_addresses_.push_back(
                {place->name, target.offset + one.r_offset - place->offset, true});
            return true;
        }
        Part part = Part::whole;
        uint64_t from = 0;
        if (type == kLow || type == kHigh) {
            part = type == kLow ? Part::low : Part::high;
            from = kImmediateAt;
        } else if (type != kAddress && type != kGenericAddress) {
            return refuse("not known for a variable");
        }
        const uint64_t bytes = part == Part::whole ? sizeof(uint64_t) : sizeof(uint32_t);
        if (target.header.sh_type != SHT_PROGBITS || target.header.sh_addr != 0 ||
            target.header.sh_size < from + bytes ||
            one.r_offset > target.header.sh_size - from - bytes) {
            return refuse("outside of its section");
        }
        const uint64_t at = target.header.sh_offset + one.r_offset + from;
        uint64_t addend = static_cast<uint64_t>(one.r_addend);
        if (table.header.sh_type == SHT_REL && part == Part::whole) {
            addend = value_at<uint64_t>(bytes_, at);
        } else if (table.header.sh_type == SHT_REL && value_at<uint32_t>(bytes_, at) != 0) {
            return refuse("half of an addend");
        }
        to_.fields_.push_back({at, part, home->offset + symbol.st_value + addend});
        *taken = true;
        return true;
    }

    MovableCubin& to_;
    const Which which_;
    std::string_view bytes_;
    uint64_t table_ = 0;
    std::vector<Section> sections_;
    std::vector<Rewrite> rewrites_;
};

MovableCubin::MovableCubin(std::string cubin, Which which) : cubin_(std::move(cubin)) {
    if (!Reader(this, which).run()) {
        bytes_ = 0;
        places_.clear();
        fields_.clear();
        stored_.clear();
        code_addresses_.clear();
    }
}

std::string MovableCubin::cubin_at(uint64_t base) const {
    std::string out = cubin_;
    for (const Field& field : fields_) {
        const uint64_t address = base + field.offset;
        const uint64_t value = field.part == Part::high ? address >> 32 : address;
        const size_t bytes = field.part == Part::whole ? sizeof(uint64_t) : sizeof(uint32_t);
        out.replace(field.at, bytes, reinterpret_cast<const char*>(&value), bytes);
    }
    return out;
}

std::vector<MovableCubin::Value> MovableCubin::values_at(uint64_t base) const {
    std::vector<Value> values;
    const std::string cubin = cubin_at(base);
    for (const Stored& one : stored_) {
        values.push_back({one.offset, cubin.substr(one.at, one.bytes)});
    }
    return values;
}

} // namespace flowgpu
