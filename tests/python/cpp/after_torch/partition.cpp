#include <torchopt_ext/partition.h>

#include <iostream>

int main() {
  for (const int64_t rank : torchopt_ext::partition_greedy({3, 4, 2}, 2)) {
    std::cout << rank << " ";
  }
}
