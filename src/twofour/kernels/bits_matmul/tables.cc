// The row that looks sums up, by permutations of bytes.
#include "tables.h"

#include "bits_matmul.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_tables)(const Matmul& a) { return tables_workspace(a); }
void TWOFOUR_HERE(bits_matmul_tables)(const Matmul& a) { tables_product(a); }

}  // namespace twofour
