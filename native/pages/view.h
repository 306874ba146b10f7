// Makes a view of CRIU's images: a folder of links to the image files, in which pagemap-PID.img and
// pages-N.img of large processes are new and lack what is written later, into the restored process.
//
// A page may come late when it is private, writable and not locked, and neither CRIU's restorer nor
// the kernel touches it before (touched). CRIU marks such pages for its own lazy restore (PE_LAZY),
// but none of a process that has a thread whose stack pointer is a multiple of 4 KiB (is_stack),
// and none of files, which userfaultfd does not know; nothing else about them is different. Two
// processes that may share pages copy-on-write get them from CRIU, which makes them share again.
// Mappings that are too large for CRIU are cut (mappings.h), in a new mm-PID.img.
// Sources: criu/mem.c, criu/pagemap.c and criu/cr-restore.c of CRIU 4.2.
#pragma once

#include "parents.h"

#include <sys/types.h>

#include <string>
#include <vector>

namespace pages {

// What is left out of a process: runs of a file of pages, ascending in it and in memory.
struct Fill {
    pid_t pid;
    std::string pages; // path
    std::vector<Run> runs;
};

struct View {
    std::vector<Fill> fills;
    std::vector<pid_t> cut; // whose mappings are other ones than in the images
    bool inherits = false;  // CRIU needs the view: pages of a process are with its parent alone
};

// Writes into `folder`, which exists and is empty; nothing when there is nothing to gain. Throws
// PagesFailure, also for what the images have that this does not know.
View make_view(const std::string& images, const std::string& folder);

} // namespace pages
