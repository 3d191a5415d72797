// Functions of libraries that this process has loaded already: looked up by name, so that none of them is linked.
#pragma once

namespace twofour {

// The function as calls of `library`, a file, would find it: in the process, then in the library and what that was linked
// with. On Windows, where a name belongs to a library, it is torch's main one. Null where there is none.
void* loaded_function(const char* name, const char* library);

}  // namespace twofour
