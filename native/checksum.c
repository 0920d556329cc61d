/* With what every machine of this kind has. */

#define NAME zeepo_checksum_base
#include "checksum.inc"
