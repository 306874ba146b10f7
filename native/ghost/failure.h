// The one exception of the mover: thrown on any thread, turned into a status at the C border or at
// the end of a job.
#pragma once

#include "fgg.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fgg {

class MoverFailure : public std::runtime_error {
  public:
    MoverFailure(fgg_status status, const std::string& text)
        : std::runtime_error(text), status_(status) {}
    fgg_status status() const { return status_; }

  private:
    fgg_status status_;
};

inline MoverFailure file_failure(const std::string& what, const std::string& path, int error) {
    const bool space = error == ENOSPC || error == EDQUOT || error == EFBIG;
    return MoverFailure(space ? FGG_NO_SPACE : FGG_IO,
                        what + " " + path + ": " + std::strerror(error));
}

} // namespace fgg
