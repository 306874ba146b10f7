#include "group.h"

#include <algorithm>
#include <map>
#include <thread>

namespace flowgpu::nccl {

namespace {

struct Group {
    int depth = 0;
    Result result = kSuccess;
    std::vector<Job> jobs;
    std::vector<std::pair<Comm*, std::vector<Task>>> tasks; // in the order of first use
};
thread_local Group group;

std::mutex background_mutex;
// Never destroyed: a process may end while something goes on.
auto& background = *new std::map<Comm*, std::shared_ptr<std::thread>>;

// Each in a thread, as they wait for each other; the first failure. Its text is the caller's.
Result all_at_once(std::vector<std::function<Result()>> steps) {
    if (steps.size() == 1)
        return steps[0]();
    std::vector<std::pair<Result, std::string>> results(steps.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < steps.size(); i++)
        threads.emplace_back([&, i] {
            const Result result = steps[i]();
            results[i] = {result, result == kSuccess ? "" : last_error()};
        });
    for (std::thread& one : threads)
        one.join();
    for (const auto& [result, text] : results)
        if (result != kSuccess)
            return failed(result, "%s", text.c_str());
    return kSuccess;
}

Result run(Group work) {
    std::vector<std::pair<Comm*, std::vector<Job>>> orders;
    for (Job& job : work.jobs) {
        auto at = std::find_if(orders.begin(), orders.end(),
                               [&](const auto& one) { return one.first == job.order; });
        if (at == orders.end())
            at = orders.insert(orders.end(), {job.order, {}});
        at->second.push_back(std::move(job));
    }
    std::vector<std::function<Result()>> steps;
    for (const auto& order : orders)
        steps.emplace_back([&order] {
            for (const Job& job : order.second)
                FN_TRY(job.run());
            return kSuccess;
        });
    FN_TRY(all_at_once(std::move(steps)));
    steps.clear();
    for (auto& [comm, tasks] : work.tasks)
        steps.emplace_back([comm = comm, &tasks = tasks] { return comm->connect(tasks); });
    FN_TRY(all_at_once(std::move(steps)));
    for (auto& [comm, tasks] : work.tasks)
        FN_TRY(comm->launch(std::move(tasks)));
    return kSuccess;
}

std::vector<Comm*> who_does_not_block(const Group& work) {
    std::vector<Comm*> found;
    for (const Job& job : work.jobs)
        if (job.reports && !job.reports->blocking)
            found.push_back(job.reports);
    for (const auto& one : work.tasks)
        if (!one.first->blocking)
            found.push_back(one.first);
    return found;
}

Result run_behind(Group work, const std::vector<Comm*>& comms) {
    for (Comm* comm : comms) {
        wait_for_background(comm); // whose result is known already
        comm->state = kInProgress;
    }
    const auto thread = std::make_shared<std::thread>();
    std::lock_guard<std::mutex> lock(background_mutex);
    for (Comm* comm : comms)
        background[comm] = thread;
    *thread = std::thread([work = std::move(work), comms]() mutable {
        const Result result = run(std::move(work));
        for (Comm* comm : comms) {
            comm->error = result == kSuccess ? "" : last_error();
            comm->state = result;
        }
    });
    return kInProgress;
}

Result finish() {
    Group work = std::move(group);
    group = {};
    if (work.result != kSuccess)
        return work.result;
    const std::vector<Comm*> behind = who_does_not_block(work);
    return behind.empty() ? run(std::move(work)) : run_behind(std::move(work), behind);
}

} // namespace

void wait_for_background(Comm* comm) {
    std::shared_ptr<std::thread> thread;
    {
        std::lock_guard<std::mutex> lock(background_mutex);
        const auto at = background.find(comm);
        if (at == background.end())
            return;
        thread = at->second;
        for (auto one = background.begin(); one != background.end();)
            one = one->second == thread ? background.erase(one) : std::next(one);
    }
    thread->join();
}

void group_start() {
    group.depth++;
}

Result group_end() {
    if (group.depth == 0)
        return failed(kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --group.depth == 0 ? finish() : group.result;
}

void group_drop() {
    group = {};
}

Result add(Job job) {
    group.jobs.push_back(std::move(job));
    return group.depth == 0 ? finish() : kSuccess;
}

Result add(Comm* comm, const Task& task) {
    auto at = std::find_if(group.tasks.begin(), group.tasks.end(),
                           [&](const auto& one) { return one.first == comm; });
    if (at == group.tasks.end())
        at = group.tasks.insert(group.tasks.end(), {comm, {}});
    at->second.push_back(task);
    return group.depth == 0 ? finish() : kSuccess;
}

} // namespace flowgpu::nccl
