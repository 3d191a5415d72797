// The tables of rows and calls of a library without Python.
#pragma once

namespace twofour {

// Fills them, once, whoever asks first.
void add_calls();

}  // namespace twofour
