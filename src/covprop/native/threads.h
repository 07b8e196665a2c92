// One parallel region: tasks that threads take one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

// Calls task(number, workspace) for every number below count, each once, from several threads.
template <class W> void run(int64_t count, int threads, const std::function<void(int64_t, W&)>& task) {
    std::atomic<int64_t> next{0};
    auto work = [&] {
        static thread_local std::unique_ptr<W> workspace;  // kept: making it takes longer than a small call
        if (!workspace) workspace.reset(new W);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            task(i, *workspace);
    };
    threads = int(std::min<int64_t>(threads, count));
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) {
        try {
            others.emplace_back(work);
        } catch (...) {  // the system has no more threads: those that there are do it
            break;
        }
    }
    work();
    for (std::thread& one : others) one.join();
}
