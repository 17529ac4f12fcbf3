#include "products.h"
